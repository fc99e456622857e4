//! Ranks that cannot see each other's memory send it, and train to the same bits.

use std::process::Command;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use zeroth_comm::JoinOptions;
use zeroth_comm::local::LocalJob;
use zeroth_program::{Gather, Settings};

use crate::job::{BF16, F32, Golden, ROOMY, Setup};

/// The transport notes of two ranks at stage 3.
fn how_they_meet(golden: &Golden, gather: Option<Gather>) -> Vec<Option<String>> {
    let settings = Settings { stage: 3, types: BF16, gather, ..ROOMY };
    let compiled = golden.compile(&Setup { ranks: 2, settings, ..Setup::default() });
    let job = LocalJob::create(2, 1 << 16).unwrap();
    std::thread::scope(|scope| {
        let ranks = [0, 1].map(|rank| {
            let comm = job.join(rank, &JoinOptions::default()).unwrap();
            let compiled = &compiled;
            scope.spawn(move || {
                let engine = golden.engine(compiled, 1, Some(comm));
                engine.transport_note().map(str::to_owned)
            })
        });
        ranks.map(|rank| rank.join().unwrap()).into()
    })
}

/// In a process of its own, because it changes a limit of the whole process.
#[test]
fn ranks_without_windows_train_to_the_same_bits() {
    const NAME: &str = "without_windows::ranks_without_windows_train_to_the_same_bits";
    const ALONE: &str = "ZEROTH_TEST_ALONE";
    if std::env::var_os(ALONE).is_some() {
        return train_without_windows();
    }
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", NAME, "--nocapture", "--test-threads", "1"])
        .env(ALONE, "1")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&child.stdout);
    assert!(child.status.success(), "{said}{}", String::from_utf8_lossy(&child.stderr));
    assert!(said.contains("1 passed"), "{said}");
}

fn train_without_windows() {
    let golden = Golden::named("qwen3-tied");
    let mut setups = Vec::new();
    for types in [BF16, F32] {
        // Stages 0 and 1 sum up before they round, 2 and 3 after it: each of them with itself.
        for (stage, ranks, accumulation) in [(0, 2, 1), (1, 3, 2), (2, 2, 2), (3, 3, 1)] {
            let settings = Settings { stage, types, accumulation, reduce_bucket: 5000, ..ROOMY };
            // 12 samples a step, as one of the golden runs has.
            let micro_batch = 12 / ranks / accumulation;
            setups.push(Setup { steps: 3, ranks, micro_batch, settings, ..Setup::default() });
        }
    }
    let has_windows = || {
        let job = LocalJob::create(1, 0).unwrap();
        let comm = job.join(0, &JoinOptions::default()).unwrap();
        comm.windows().is_some()
    };
    assert!(has_windows());
    assert_eq!(how_they_meet(&golden, None), [None, None]);
    let in_place: Vec<_> = setups.iter().map(|setup| golden.train(setup)).collect();
    // A user who may write small files only has no room for windows.
    let Rlimit { maximum, .. } = getrlimit(Resource::Fsize);
    setrlimit(Resource::Fsize, Rlimit { current: Some(1 << 30), maximum }).unwrap();
    assert!(!has_windows());
    for (setup, expected) in setups.iter().zip(in_place) {
        assert!(golden.train(setup) == expected, "{setup:?}");
    }
    // Where they should have read in place they say what that costs, and what to write.
    for said in how_they_meet(&golden, None) {
        assert!(said.unwrap().contains("zeroth.gather \"copy\" plans for copies"));
    }
    assert_eq!(how_they_meet(&golden, Some(Gather::Copy)), [None, None]);
}
