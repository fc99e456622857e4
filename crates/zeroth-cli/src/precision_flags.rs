//! The precision that --bf16, --fp16, --fp32 and --torch-dtype ask for.

use zeroth::base::DType;

/// `--torch-dtype`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TorchDtype {
    /// That of the model's config.json.
    Auto,
    /// This one.
    Given(DType),
}

/// Parses PyTorch's and Hugging Face's names of dtypes.
pub(crate) fn torch_dtype(text: &str) -> Result<TorchDtype, String> {
    match text.trim_start_matches("torch.").to_ascii_lowercase().as_str() {
        "auto" => Ok(TorchDtype::Auto),
        name => match DType::from_name(name) {
            Some(dtype) => Ok(TorchDtype::Given(dtype)),
            None => Err("give bfloat16, float16, float32 or auto".to_owned()),
        },
    }
}

/// The flags of a run that concern precision.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct PrecisionFlags {
    pub(crate) bf16: Option<bool>,
    pub(crate) fp16: Option<bool>,
    pub(crate) fp32: Option<bool>,
    pub(crate) torch_dtype: Option<TorchDtype>,
}

impl PrecisionFlags {
    /// Whether the precision is that of the model's config.json.
    pub(crate) fn is_of_model(self) -> bool {
        let is_on = [self.bf16, self.fp16, self.fp32].contains(&Some(true));
        self.torch_dtype == Some(TorchDtype::Auto) && !is_on
    }

    /// The precision given, and whether --torch-dtype alone says it; `model` is the dtype of the model's config.json.
    /// `--bf16 False` alone selects fp32.
    pub(crate) fn precision(self, model: Option<DType>) -> anyhow::Result<(Option<DType>, bool)> {
        let switches = [
            ("--bf16", self.bf16, DType::Bf16),
            ("--fp16", self.fp16, DType::F16),
            ("--fp32", self.fp32, DType::F32),
        ];
        let on: Vec<_> = switches.iter().filter(|(_, is_on, _)| *is_on == Some(true)).collect();
        if on.len() > 1 {
            let flags: Vec<&str> = on.iter().map(|(flag, ..)| *flag).collect();
            anyhow::bail!("{} are mutually exclusive: a run has one precision", flags.join(" and "));
        }
        if let Some(TorchDtype::Given(dtype)) = self.torch_dtype {
            let contradiction = switches.iter().find(|(_, is_on, precision)| match is_on {
                Some(true) => *precision != dtype,
                Some(false) => *precision == dtype,
                None => false,
            });
            if let Some((flag, is_on, _)) = contradiction {
                let switch = if *is_on == Some(true) { (*flag).to_owned() } else { format!("{flag} false") };
                anyhow::bail!(
                    "{switch} and --torch-dtype for {dtype} contradict each other: a run has one precision, with fp32 \
                     master weights in any case; leave one of them out"
                );
            }
        }
        Ok(match (on.first(), self.torch_dtype) {
            (Some((_, _, precision)), _) => (Some(*precision), false),
            (None, Some(TorchDtype::Given(dtype))) => (Some(dtype), true),
            (None, Some(TorchDtype::Auto)) => (model, true),
            (None, None) if self.bf16 == Some(false) => (Some(DType::F32), false),
            (None, None) => (None, false),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_precision_remains_or_the_contradiction_is_refused() {
        let of = |bf16, fp16, fp32, dtype: Option<&str>, model| {
            let torch_dtype = dtype.map(|name| torch_dtype(name).unwrap());
            PrecisionFlags { bf16, fp16, fp32, torch_dtype }
                .precision(model)
                .map_err(|error| error.to_string())
        };
        let (yes, no) = (Some(true), Some(false));
        assert_eq!(of(None, None, None, None, None), Ok((None, false)));
        assert_eq!(of(no, None, None, None, None), Ok((Some(DType::F32), false)));
        assert_eq!(of(None, None, None, Some("torch.float16"), None), Ok((Some(DType::F16), true)));
        assert_eq!(of(None, None, None, Some("auto"), Some(DType::F32)), Ok((Some(DType::F32), true)));
        assert_eq!(of(None, None, None, Some("auto"), None), Ok((None, true)));
        assert_eq!(of(yes, None, None, Some("auto"), Some(DType::F32)), Ok((Some(DType::Bf16), false)));
        assert_eq!(of(yes, None, None, Some("bfloat16"), None), Ok((Some(DType::Bf16), false)));
        assert_eq!(of(no, None, None, Some("float16"), None), Ok((Some(DType::F16), true)));
        for refused in [
            of(yes, yes, None, None, None),
            of(yes, None, None, Some("float32"), None),
            of(no, None, None, Some("bfloat16"), None),
            of(None, yes, None, Some("bfloat16"), None),
        ] {
            assert!(refused.unwrap_err().contains("one precision"));
        }
        assert!(torch_dtype("int8").is_err());
    }
}
