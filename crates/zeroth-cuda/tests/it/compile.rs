//! Compiles all CUDA kernels, which needs NVRTC but no GPU. The example `cuda_self_test` runs them on a GPU.

#![allow(clippy::print_stdout, reason = "a skipped test says so")]

use zeroth_base::DType;
use zeroth_cuda::{CompiledKernels, compile_kernels};

/// Bytes of shared memory that kernels may declare on any GPU.
const STATIC_LIMIT: u32 = 48 << 10;

fn compile(arch: &str, attention: Option<(usize, DType)>, with_context: bool) {
    let CompiledKernels { bytes, static_shared, shared, shared_limit } = match compile_kernels(
        arch,
        attention,
        with_context,
    ) {
        Ok(compiled) => compiled,
        Err(error) if error.to_string().contains("opening libnvrtc") => {
            println!(
                "skipped: NVRTC was not found; set ZEROTH_CUDA_LIBRARIES to the folder with libnvrtc.so to run it"
            );
            return;
        }
        Err(error) => panic!("{arch}, {attention:?}: {error}"),
    };
    assert!(bytes > 20_000, "{bytes} bytes of machine code for {arch}, {attention:?}");
    assert!(
        static_shared <= STATIC_LIMIT,
        "{static_shared} bytes of shared memory for {arch}, {attention:?}"
    );
    // Where the largest heads do not fit, attention runs on CUDA cores.
    let is_large = attention.is_some_and(|(head, _)| head > 128) && shared_limit < 163 << 10;
    let fits = shared <= shared_limit;
    assert_eq!(fits, !is_large, "{shared} of {shared_limit} bytes for {arch}, {attention:?}");
}

macro_rules! compiles {
    ($($name:ident: $arch:literal, $attention:expr, $with_context:literal;)*) => {
        $(#[test]
        fn $name() {
            compile($arch, $attention, $with_context);
        })*
    };
}

// One test per program, since each takes up to half a minute. bf16 and fp16 share their source, so fp16 is compiled once per
// architecture. CI has a diagonal; all that the one without attention has for Ampere is compiled for Hopper too, for sizes
// that bulk tensor copies cannot move. Cards of 99 KiB of shared memory are 8.6, 8.9 and 12.0.
compiles! {
    ampere_long_heads: "sm_80", Some((256, DType::Bf16)), false;
    hopper: "sm_90a", None, false;
    hopper_encoder_decoders: "sm_90a", Some((128, DType::Bf16)), true;
    blackwell_usual_heads_fp16: "sm_100", Some((128, DType::F16)), false;
    ada_short_heads: "sm_89", Some((64, DType::Bf16)), false;
}

mod rest {
    use super::*;

    fn compile(arch: &str, attention: Option<(usize, DType)>, with_context: bool) {
        if std::env::var_os("ZEROTH_FULL").is_some() {
            super::compile(arch, attention, with_context);
        } else {
            println!("skipped: ZEROTH_FULL=1 compiles for {arch}, {attention:?}, too");
        }
    }

    compiles! {
        ampere: "sm_80", None, false;
        ampere_encoder_decoders: "sm_80", Some((64, DType::Bf16)), true;
        hopper_usual_heads: "sm_90a", Some((128, DType::Bf16)), false;
        ampere_short_heads: "sm_80", Some((64, DType::Bf16)), false;
        ampere_usual_heads: "sm_80", Some((128, DType::Bf16)), false;
        ampere_usual_encoder_decoders: "sm_80", Some((128, DType::F16)), true;
        ampere_long_encoder_decoders: "sm_80", Some((256, DType::Bf16)), true;
        ampere_usual_heads_fp16: "sm_80", Some((128, DType::F16)), false;
        hopper_short_heads: "sm_90a", Some((64, DType::Bf16)), false;
        hopper_short_encoder_decoders: "sm_90a", Some((64, DType::Bf16)), true;
        hopper_long_encoder_decoders: "sm_90a", Some((256, DType::F16)), true;
        hopper_usual_heads_fp16: "sm_90a", Some((128, DType::F16)), false;
        hopper_long_heads: "sm_90a", Some((256, DType::Bf16)), false;
        small_ampere: "sm_86", None, false;
        small_ampere_short_heads: "sm_86", Some((64, DType::Bf16)), false;
        small_ampere_usual_heads: "sm_86", Some((128, DType::Bf16)), false;
        small_ampere_long_heads: "sm_86", Some((256, DType::Bf16)), false;
        small_ampere_encoder_decoders: "sm_86", Some((128, DType::Bf16)), true;
        ada: "sm_89", None, false;
        ada_usual_heads: "sm_89", Some((128, DType::Bf16)), false;
        ada_long_heads: "sm_89", Some((256, DType::Bf16)), false;
        ada_encoder_decoders: "sm_89", Some((64, DType::Bf16)), true;
        small_blackwell: "sm_120", None, false;
        small_blackwell_short_heads: "sm_120", Some((64, DType::Bf16)), false;
        small_blackwell_usual_heads: "sm_120", Some((128, DType::Bf16)), false;
        small_blackwell_long_heads: "sm_120", Some((256, DType::Bf16)), false;
        small_blackwell_encoder_decoders: "sm_120", Some((128, DType::Bf16)), true;
        blackwell_encoder_decoders: "sm_100", Some((128, DType::Bf16)), true;
        blackwell: "sm_100", None, false;
        blackwell_short_heads: "sm_100", Some((64, DType::Bf16)), false;
        blackwell_usual_heads: "sm_100", Some((128, DType::Bf16)), false;
        blackwell_long_heads: "sm_100", Some((256, DType::Bf16)), false;
    }
}

#[test]
fn unsupported_head_dims_and_fp32_are_rejected() {
    for attention in [(20, DType::Bf16), (264, DType::Bf16), (64, DType::F32)] {
        let error = compile_kernels("sm_80", Some(attention), false).err().unwrap().to_string();
        assert!(error.contains("multiples of 8 up to 256") || error.contains("opening libnvrtc"), "{error}");
    }
}
