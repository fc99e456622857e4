//! Dtypes of stored tensors.

use std::fmt;

/// The dtype of a stored tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DType {
    /// IEEE single precision.
    F32,
    /// The upper half of an f32: its range, 8 bits of precision.
    Bf16,
    /// IEEE half precision: 11 bits of precision, largest value 65,504.
    F16,
}

impl DType {
    /// Bytes of one element.
    pub const fn bytes(self) -> u64 {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
        }
    }

    /// Parses a name of DeepSpeed (`fp16`), PyTorch (`float16`) or safetensors (`F16`).
    pub fn from_name(name: &str) -> Option<Self> {
        match name.strip_prefix("torch.").unwrap_or(name).to_ascii_lowercase().as_str() {
            "fp32" | "float32" | "float" | "f32" => Some(Self::F32),
            "bf16" | "bfloat16" => Some(Self::Bf16),
            "fp16" | "float16" | "half" | "f16" => Some(Self::F16),
            _ => None,
        }
    }
}

impl fmt::Display for DType {
    /// The name DeepSpeed's keys use.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "fp32",
            Self::Bf16 => "bf16",
            Self::F16 => "fp16",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_deepspeed_pytorch_and_safetensors_are_parsed() {
        for name in ["fp16", "float16", "torch.float16", "F16", "half"] {
            assert_eq!(DType::from_name(name), Some(DType::F16), "{name}");
        }
        assert_eq!(DType::from_name("bfloat16"), Some(DType::Bf16));
        assert_eq!(DType::from_name("float32").map(DType::bytes), Some(4));
        assert_eq!(DType::from_name("int8"), None);
    }

    #[test]
    fn a_displayed_name_parses_back() {
        for dtype in [DType::F32, DType::Bf16, DType::F16] {
            assert_eq!(DType::from_name(&dtype.to_string()), Some(dtype));
        }
    }
}
