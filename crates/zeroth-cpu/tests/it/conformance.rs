//! The CPU's own kernels in the conformance test: the portable path beside the best one.

use zeroth_cpu::{CpuDevice, Isa, Pool};
use zeroth_kernel::{ByTier, CONFORMANCE_ARENA, SelfTest, conformance};

#[test]
fn portable_kernels_conform_to_the_best_ones() {
    let portable = Pool::on_isa(2, Isa::Portable).expect("every CPU has it");
    let mut device = CpuDevice::on_pool(portable, ByTier::on_device(CONFORMANCE_ARENA)).unwrap();
    let mut reference = CpuDevice::on_pool(Pool::new(2), ByTier::on_device(CONFORMANCE_ARENA)).unwrap();
    let tests = conformance(&mut device, &mut reference).unwrap();
    let wrong: Vec<&SelfTest> = tests.iter().filter(|test| !test.ok).collect();
    assert!(wrong.is_empty(), "{wrong:?}");
    assert!(tests.len() > 100, "{}", tests.len());
    // Each kernel in each type.
    let named = |name: &str| tests.iter().filter(|test| test.name.starts_with(name)).count();
    for kernel in ["linear ", "attention_backward ", "head_loss_backward ", "optimize ", "control ", "rope "]
    {
        assert!(named(kernel) >= 3, "{kernel}");
    }
}
