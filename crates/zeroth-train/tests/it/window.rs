//! Offloaded optimizer state on a GPU: the memory of its staging window, planned without a GPU.

use std::path::Path;

use zeroth_config::resolve::Choice;
use zeroth_cuda::CudaTarget;
use zeroth_kernel::{Queue, Tier};
use zeroth_machine::Rates;
use zeroth_program::Compiled;
use zeroth_program::{Action, Recompute, UpdatedBy};
use zeroth_train::{Budget, Freedom, Job};

use crate::small_job::job;

/// A job whose units have separate flat buffers.
fn cut(folder: &Path) -> Job {
    let mut job = job(folder);
    job.settings.persistence = 0;
    job
}

/// Compiles within a GPU memory budget; returns the program and its window.
fn fitted(job: &mut Job, device: u64) -> Option<(Compiled, Option<u64>)> {
    let budget = Budget::of_device(device);
    let (compiled, choices) = job.fit(&CudaTarget, budget, Freedom::default()).unwrap().ok()?;
    assert!(compiled.memory.arena(Tier::Device) <= device);
    let window = choices.iter().find_map(|choice| match choice {
        Choice::UpdateWindow(bytes) => Some(*bytes),
        _ => None,
    });
    Some((compiled, window))
}

fn count(compiled: &Compiled, is: fn(&Action) -> bool) -> usize {
    let instructions = compiled.program.sections.iter().flat_map(|section| &section.instructions);
    instructions.filter(|instruction| is(&instruction.action)).count()
}

#[test]
fn ample_memory_opens_the_whole_window() {
    let folder = tempfile::tempdir().unwrap();
    let (compiled, window) = fitted(&mut cut(folder.path()), 1 << 40).unwrap();
    let states = compiled.memory.states(Tier::Host);
    assert!(window.unwrap() > states, "{window:?} for {states}");
    assert_eq!(count(&compiled, |action| matches!(action, Action::OffloadGrad(..))), 0);
    let loads = count(&compiled, |action| matches!(action, Action::LoadStates(_)));
    assert!(loads > 1);
    assert_eq!(count(&compiled, |action| matches!(action, Action::StoreStates(_))), loads);
    // Every load precedes the first update: none waits for another's buffer.
    let update = compiled.program.sections.last().unwrap();
    let first = update.instructions.iter().position(|i| matches!(i.action, Action::Update(_))).unwrap();
    let ahead = update.instructions[..first].iter().filter(|i| matches!(i.action, Action::LoadStates(_)));
    assert_eq!(ahead.count(), loads);
}

#[test]
fn less_memory_closes_the_window() {
    let folder = tempfile::tempdir().unwrap();
    let saves = |compiled: &Compiled| count(compiled, |action| matches!(action, Action::OffloadGrad(..)));
    let (roomy, window) = fitted(&mut cut(folder.path()), 1 << 40).unwrap();
    // Half of the window: the free memory is used, except for a reserve.
    let half = roomy.memory.arena(Tier::Device) - window.unwrap() / 2;
    let (closer, narrower) = fitted(&mut cut(folder.path()), half).unwrap();
    assert_eq!(saves(&closer), 0);
    assert!(narrower.unwrap() < window.unwrap() / 2 && narrower.unwrap() > window.unwrap() / 4);
    // The minimum that fits.
    let (mut too_little, mut enough) = (0, half);
    while enough - too_little > 256 {
        let middle = u64::midpoint(too_little, enough);
        let fits = fitted(&mut cut(folder.path()), middle).is_some();
        *(if fits { &mut enough } else { &mut too_little }) = middle;
    }
    let (least, _) = fitted(&mut cut(folder.path()), enough).unwrap();
    assert!(saves(&least) > 0);
    let gradients = least.memory.by_category(Tier::Host).gradients;
    assert!(gradients > 0 && least.memory.by_category(Tier::Device).gradients == 0);
}

/// The update device chosen by these rates, and whether the choice is reported.
fn updated_by(device: u64, update: u64, bus: u64) -> (Option<UpdatedBy>, bool) {
    let folder = tempfile::tempdir().unwrap();
    updater(&mut cut(folder.path()), device, update, bus)
}

fn updater(job: &mut Job, device: u64, update: u64, bus: u64) -> (Option<UpdatedBy>, bool) {
    let budget = Budget::of_device(device);
    let rates = Rates { update, bus, memory: 1 << 40, matmuls: 1 << 40 };
    let freedom = Freedom { update: Some(rates), ..Freedom::default() };
    let (compiled, choices) = job.fit(&CudaTarget, budget, freedom).unwrap().unwrap();
    assert!(compiled.memory.arena(Tier::Device) <= device);
    let by = job.settings.offload.updated_by;
    let loads = count(&compiled, |action| matches!(action, Action::LoadStates(_)));
    assert_eq!(loads > 0, by != Some(UpdatedBy::Host), "{by:?} with {loads} loads");
    // The CPU update is not part of any forward or backward section.
    let update = compiled.program.sections.last().unwrap();
    let mut updates = update.instructions.iter().filter(|i| matches!(i.action, Action::Update(_)));
    assert!(updates.all(|i| i.queue == Queue::Load));
    (by, choices.iter().any(|choice| matches!(choice, Choice::UpdatedBy(_))))
}

#[test]
fn measured_rates_choose_the_update_device() {
    let folder = tempfile::tempdir().unwrap();
    let roomy = 1 << 40;
    let (compiled, window) = fitted(&mut cut(folder.path()), roomy).unwrap();
    let small =
        compiled.memory.arena(Tier::Device) - window.unwrap() + compiled.memory.states(Tier::Host) / 4;
    // As fast as the bus, with GPU memory for all state, and with less.
    assert_eq!(updated_by(roomy, 1000, 1000), (Some(UpdatedBy::Device), true));
    assert_eq!(updated_by(small, 1100, 1000), (Some(UpdatedBy::Host), true));
    // CPUs that are fast or slow relative to the bus.
    assert_eq!(updated_by(roomy, 4000, 1000), (Some(UpdatedBy::Host), true));
    assert_eq!(updated_by(small, 400, 1000), (Some(UpdatedBy::Device), true));
}

#[test]
fn host_accumulation_counts_against_the_cpu() {
    let folder = tempfile::tempdir().unwrap();
    let mut job = cut(folder.path());
    // CPUs four times as fast as the bus win, until gradients of several micro-batches accumulate in host memory.
    assert_eq!(updater(&mut job, 1 << 40, 4000, 1000).0, Some(UpdatedBy::Host));
    let mut job = cut(folder.path());
    (job.settings.accumulation, job.shape.accumulation) = (4, 4);
    assert_eq!(updater(&mut job, 1 << 40, 4000, 1000).0, Some(UpdatedBy::Device));
}

#[test]
fn a_given_window_is_kept() {
    let folder = tempfile::tempdir().unwrap();
    let mut job = job(folder.path());
    job.settings.offload.update_window = Some(1 << 16);
    let (compiled, chosen) = fitted(&mut job, 1 << 40).unwrap();
    assert_eq!((compiled.program.update_window, chosen), (Some(1 << 16), None));
}

#[test]
fn an_oversized_window_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let mut job = job(folder.path());
    job.settings.offload.update_window = Some(u64::MAX);
    let budget = Budget::of_device(1 << 40);
    let refused = job.fit(&CudaTarget, budget, Freedom::default()).unwrap().unwrap_err();
    assert_eq!((refused.of, refused.given), ("device memory", 1 << 40));
    assert!(refused.needed > 1 << 59, "{refused}");
    assert!(refused.to_string().contains("\n  zeroth.update_window 0"), "{refused}");
}

#[test]
fn cheap_recomputation_frees_memory_for_the_window() {
    let folder = tempfile::tempdir().unwrap();
    let (roomy, window) = fitted(&mut cut(folder.path()), 1 << 40).unwrap();
    let small = roomy.memory.arena(Tier::Device) - window.unwrap() + roomy.memory.states(Tier::Host) / 4;
    let chosen = |device: u64, accumulation: u64, rates: Rates| {
        let mut job = cut(folder.path());
        (job.settings.accumulation, job.shape.accumulation) = (accumulation, accumulation);
        let budget = Budget::of_device(device);
        let freedom = Freedom { recompute: true, update: Some(rates), ..Freedom::default() };
        let (compiled, _) = job.fit(&CudaTarget, budget, freedom).unwrap().unwrap();
        assert!(compiled.memory.arena(Tier::Device) <= device);
        (job.settings.recompute, job.settings.offload.update_window)
    };
    // A bus that is slow relative to GPU memory and matmuls, and CPUs that are slower still.
    let slow = Rates { update: 1 << 10, bus: 1 << 20, memory: 1 << 30, matmuls: 1 << 40 };
    let (recompute, wider) = chosen(small, 1, slow);
    let (nothing, window) = chosen(small, 1, Rates { matmuls: 1, ..slow });
    assert_eq!((recompute, nothing), (Recompute::NormSwiGlu, Recompute::Nothing), "forward hides the bus");
    assert!(wider > window, "{wider:?} {window:?}");
    // With enough memory, or where recomputation takes longer, there is nothing to gain.
    assert_eq!(chosen(1 << 40, 1, slow).0, Recompute::Nothing);
    assert_eq!(chosen(small, 4, Rates { memory: 1 << 20, ..slow }).0, Recompute::Nothing);
}
