//! The kernels of NVIDIA's cards as far as a machine without one can test them. On a card, the example `cuda_self_test`
//! compares them all with their references.

#![allow(clippy::print_stdout, reason = "a skipped test says so")]

use zeroth_device::cuda::compile_kernels;

/// Generations of cards: Ampere, Hopper and Blackwell.
const ARCHITECTURES: [&str; 3] = ["sm_80", "sm_90a", "sm_100"];

fn compiles(head: Option<usize>) {
    for arch in ARCHITECTURES {
        match compile_kernels(arch, head) {
            Ok(bytes) => assert!(bytes > 50_000, "{bytes} bytes of machine code for {arch}, {head:?}"),
            Err(error) if error.to_string().contains("opening libnvrtc") => {
                println!(
                    "skipped: NVRTC was not found; set ZEROTH_CUDA_LIBRARIES to the folder with libnvrtc.so to run it"
                );
                return;
            }
            Err(error) => panic!("{arch}, {head:?}: {error}"),
        }
    }
}

#[test]
fn kernels_compile_for_every_generation_of_cards() {
    compiles(None);
}

#[test]
fn attention_of_short_heads_compiles() {
    compiles(Some(64));
}

#[test]
fn attention_of_usual_heads_compiles() {
    compiles(Some(128));
}

#[test]
fn attention_of_long_heads_compiles() {
    compiles(Some(256));
}
