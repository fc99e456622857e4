//! State in host memory and a GPU: what of the card's memory its way through the card takes, planned without a card.

#![allow(clippy::unwrap_used, reason = "a panic in a test is the report")]

mod small_job;

use std::path::Path;

use small_job::job;
use zeroth_kernel::{Queue, Tier};
use zeroth_machine::Rates;
use zeroth_program::Compiled;
use zeroth_program::Target;
use zeroth_program::{Action, Recompute, UpdatedBy};
use zeroth_train::{Budget, Freedom, Job};

/// A job whose units have flats of their own.
fn cut(folder: &Path) -> Job {
    let mut job = job(folder);
    job.settings.persistence = 0;
    job
}

/// A program within so many bytes of a card, and the window that was chosen for it.
fn fitted(job: &mut Job, device: u64) -> Option<(Compiled, Option<u64>)> {
    let budget = Budget { device: Some(device), ..Budget::default() };
    let (compiled, choices) = job.fit(Target::Cuda, budget, Freedom::default()).unwrap().ok()?;
    assert!(compiled.memory.arena(Tier::Device) <= device);
    let window = choices.iter().find(|choice| choice.key == "zeroth.update_window");
    Some((compiled, window.map(|choice| choice.value.as_u64().unwrap())))
}

fn count(compiled: &Compiled, is: fn(&Action) -> bool) -> usize {
    let instructions = compiled.program.sections.iter().flat_map(|section| &section.instructions);
    instructions.filter(|instruction| is(&instruction.action)).count()
}

#[test]
fn with_memory_to_spare_all_state_is_on_its_way_and_gradients_stay() {
    let folder = tempfile::tempdir().unwrap();
    let (compiled, window) = fitted(&mut cut(folder.path()), 1 << 40).unwrap();
    let states = compiled.memory.states(Tier::Host);
    assert!(window.unwrap() > states, "{window:?} for {states}");
    assert_eq!(count(&compiled, |action| matches!(action, Action::SaveGradient(..))), 0);
    let loads = count(&compiled, |action| matches!(action, Action::Load(_)));
    assert!(loads > 1);
    assert_eq!(count(&compiled, |action| matches!(action, Action::Store(_))), loads);
    // Every load stands before the first update: none waits for another's place.
    let update = compiled.program.sections.last().unwrap();
    let first = update.instructions.iter().position(|i| matches!(i.action, Action::Update(_))).unwrap();
    let ahead = update.instructions[..first].iter().filter(|i| matches!(i.action, Action::Load(_)));
    assert_eq!(ahead.count(), loads);
}

#[test]
fn with_less_memory_the_window_closes_and_then_gradients_leave() {
    let folder = tempfile::tempdir().unwrap();
    let saves = |compiled: &Compiled| count(compiled, |action| matches!(action, Action::SaveGradient(..)));
    let (roomy, window) = fitted(&mut cut(folder.path()), 1 << 40).unwrap();
    // Half of the window gone: what is left is taken, but for a part that stays free.
    let half = roomy.memory.arena(Tier::Device) - window.unwrap() / 2;
    let (closer, narrower) = fitted(&mut cut(folder.path()), half).unwrap();
    assert_eq!(saves(&closer), 0);
    assert!(narrower.unwrap() < window.unwrap() / 2 && narrower.unwrap() > window.unwrap() / 4);
    // The least that fits.
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

/// Who updates by these rates, and whether that is a choice that is told.
fn updated_by(device: u64, update: u64, bus: u64) -> (Option<UpdatedBy>, bool) {
    let folder = tempfile::tempdir().unwrap();
    updater(&mut cut(folder.path()), device, update, bus)
}

fn updater(job: &mut Job, device: u64, update: u64, bus: u64) -> (Option<UpdatedBy>, bool) {
    let budget = Budget { device: Some(device), ..Budget::default() };
    let rates = Rates { update, bus, memory: 1 << 40, matmuls: 1 << 40 };
    let freedom = Freedom { update: Some(rates), ..Freedom::default() };
    let (compiled, choices) = job.fit(Target::Cuda, budget, freedom).unwrap().unwrap();
    assert!(compiled.memory.arena(Tier::Device) <= device);
    let by = job.settings.offload.updated_by;
    let loads = count(&compiled, |action| matches!(action, Action::Load(_)));
    assert_eq!(loads > 0, by != Some(UpdatedBy::Host), "{by:?} with {loads} loads");
    // The update by processors is in no line of forward or backward.
    let update = compiled.program.sections.last().unwrap();
    let mut updates = update.instructions.iter().filter(|i| matches!(i.action, Action::Update(_)));
    assert!(updates.all(|i| i.queue == Queue::Load));
    (by, choices.iter().any(|choice| choice.key == "zeroth.update"))
}

#[test]
fn who_updates_follows_from_what_the_machine_can_do() {
    let folder = tempfile::tempdir().unwrap();
    let roomy = 1 << 40;
    let (compiled, window) = fitted(&mut cut(folder.path()), roomy).unwrap();
    let small =
        compiled.memory.arena(Tier::Device) - window.unwrap() + compiled.memory.states(Tier::Host) / 4;
    // As fast as the bus, with room for all state on the card, and with less.
    assert_eq!(updated_by(roomy, 1000, 1000), (Some(UpdatedBy::Device), true));
    assert_eq!(updated_by(small, 1100, 1000), (Some(UpdatedBy::Host), true));
    // Processors that are fast or slow beside the bus.
    assert_eq!(updated_by(roomy, 4000, 1000), (Some(UpdatedBy::Host), true));
    assert_eq!(updated_by(small, 400, 1000), (Some(UpdatedBy::Device), true));
}

#[test]
fn sums_in_host_memory_are_counted_against_processors() {
    let folder = tempfile::tempdir().unwrap();
    let mut job = cut(folder.path());
    // Processors four times as fast as the bus win, until gradients of several micro-batches meet in host memory.
    assert_eq!(updater(&mut job, 1 << 40, 4000, 1000).0, Some(UpdatedBy::Host));
    let mut job = cut(folder.path());
    (job.settings.accumulation, job.shape.accumulation) = (4, 4);
    assert_eq!(updater(&mut job, 1 << 40, 4000, 1000).0, Some(UpdatedBy::Device));
}

#[test]
fn a_window_that_was_typed_is_taken_as_it_is() {
    let folder = tempfile::tempdir().unwrap();
    let mut job = job(folder.path());
    job.settings.offload.window = Some(1 << 16);
    let (compiled, chosen) = fitted(&mut job, 1 << 40).unwrap();
    assert_eq!((compiled.program.window, chosen), (Some(1 << 16), None));
}

#[test]
fn a_window_beyond_all_measure_is_refused_with_what_is_missing() {
    let folder = tempfile::tempdir().unwrap();
    let mut job = job(folder.path());
    job.settings.offload.window = Some(u64::MAX);
    let budget = Budget { device: Some(1 << 40), ..Budget::default() };
    let refused = job.fit(Target::Cuda, budget, Freedom::default()).unwrap().unwrap_err();
    assert_eq!((refused.of, refused.given), ("device memory", 1 << 40));
    assert!(refused.needed > 1 << 59, "{refused}");
    assert!(refused.to_string().contains("\n  zeroth.update_window 0"), "{refused}");
}

#[test]
fn what_is_cheap_to_compute_again_gives_its_room_to_a_window_that_is_too_small() {
    let folder = tempfile::tempdir().unwrap();
    let (roomy, window) = fitted(&mut cut(folder.path()), 1 << 40).unwrap();
    let small = roomy.memory.arena(Tier::Device) - window.unwrap() + roomy.memory.states(Tier::Host) / 4;
    let chosen = |device: u64, accumulation: u64, rates: Rates| {
        let mut job = cut(folder.path());
        (job.settings.accumulation, job.shape.accumulation) = (accumulation, accumulation);
        let budget = Budget { device: Some(device), ..Budget::default() };
        let freedom = Freedom { recompute: true, update: Some(rates), ..Freedom::default() };
        let (compiled, _) = job.fit(Target::Cuda, budget, freedom).unwrap().unwrap();
        assert!(compiled.memory.arena(Tier::Device) <= device);
        (job.settings.recompute, job.settings.offload.window)
    };
    // A bus that is slow beside the card's memory and its products, and processors that are slower still.
    let slow = Rates { update: 1 << 10, bus: 1 << 20, memory: 1 << 30, matmuls: 1 << 40 };
    let (recompute, wider) = chosen(small, 1, slow);
    let (nothing, window) = chosen(small, 1, Rates { matmuls: 1, ..slow });
    assert_eq!((recompute, nothing), (Recompute::NormSwiGlu, Recompute::Nothing), "forward hides the bus");
    assert!(wider > window, "{wider:?} {window:?}");
    // With room for all of it, or where computing it again takes longer, there is nothing to gain.
    assert_eq!(chosen(1 << 40, 1, slow).0, Recompute::Nothing);
    assert_eq!(chosen(small, 4, Rates { memory: 1 << 20, ..slow }).0, Recompute::Nothing);
}
