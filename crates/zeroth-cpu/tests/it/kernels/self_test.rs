//! The self-test that `zeroth doctor` runs.

use zeroth_cpu::{Isa, Pool, self_test_on};

#[test]
fn every_kernel_matches_its_reference_on_every_isa() {
    for &isa in Isa::available() {
        let tests = self_test_on(&Pool::on_isa(2, isa).unwrap());
        let bad: Vec<_> = tests.iter().filter(|test| !test.ok).collect();
        assert!(tests.len() > 100 && bad.is_empty(), "{isa:?}: {bad:#?}");
    }
}
