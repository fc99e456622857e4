//! Sums over ranks as the device runs them.

use zeroth_base::DType;
use zeroth_cpu::CpuDevice;
use zeroth_kernel::{ByTier, Device, Queue, RankSum, Span};

#[test]
fn overlapping_operands_are_refused() {
    let mut device = CpuDevice::new(1, ByTier::on_device(4096)).unwrap();
    // 32 elements.
    let [own, to, apart] = [(0, 64), (256, 128), (512, 88)].map(|(at, bytes)| Span::device(at, bytes));
    let sum = |to: Span, squares: u64| RankSum {
        ranks: 1,
        rank: 0,
        own,
        other: &|rank| unreachable!("rank {rank} is not there"),
        from_type: DType::Bf16,
        to,
        to_type: DType::F32,
        add: false,
        squares: Some(Span { at: squares, ..apart }),
    };
    assert!(device.sum_ranks(Queue::Comm, &sum(to, apart.at)).is_ok());
    for (to, squares) in [(Span { at: 32, ..to }, apart.at), (to, own.at), (to, to.at + 64)] {
        let refused = device.sum_ranks(Queue::Comm, &sum(to, squares)).unwrap_err();
        assert!(refused.to_string().contains("overlap"), "{refused}");
    }
}
