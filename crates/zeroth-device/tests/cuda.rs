//! The kernels of NVIDIA's cards as far as a machine without one can test them. On a card, the example `cuda_self_test`
//! compares them all with their references.

#![allow(clippy::print_stdout, reason = "a skipped test says so")]

use zeroth_device::cuda::compile_all;

fn compiles(arch: &str) {
    match compile_all(arch) {
        Ok(bytes) => assert!(bytes > 100_000, "{bytes} bytes of machine code for {arch}"),
        Err(error) if error.to_string().contains("opening libnvrtc") => println!(
            "skipped: NVRTC was not found; set ZEROTH_CUDA_LIBRARIES to the folder with libnvrtc.so to run it"
        ),
        Err(error) => panic!("{arch}: {error}"),
    }
}

#[test]
fn every_kernel_compiles_for_ampere() {
    compiles("sm_80");
}

#[test]
fn every_kernel_compiles_for_hopper() {
    compiles("sm_90a");
}

#[test]
fn every_kernel_compiles_for_blackwell() {
    compiles("sm_100");
}
