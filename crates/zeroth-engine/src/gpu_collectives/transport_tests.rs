//! Transports that fail, on a driver and an NCCL without a GPU (`tests/fakes/gpu.c`).
//!
//! Every test starts itself again in a process that finds these libraries.

use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use zeroth_base::Axis;
use zeroth_comm::local::LocalJob;
use zeroth_comm::{Comm, JoinOptions};
use zeroth_cuda::CudaDevice;
use zeroth_kernel::ByTier;

use super::*;

/// Set in the process with the libraries: the number of ranks.
const RANKS: &str = "ZEROTH_TEST_RANKS";
const ARENA: u64 = 8 << 20;

/// Compiles the libraries into a folder.
fn libraries(folder: &Path) {
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fakes/gpu.c");
    let [driver, others @ ..] = ["libcuda.so.1", "libnvrtc.so.13", "libcublasLt.so.13", "libnccl.so.2"];
    let driver = folder.join(driver);
    let output = Command::new("cc")
        .args(["-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread", "-Wl,-Bsymbolic", "-o"])
        .arg(&driver)
        .arg(source)
        .output()
        .expect("Rust itself links with cc");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    for library in others {
        std::fs::copy(&driver, folder.join(library)).unwrap();
    }
}

/// Runs this test again with `ranks` on `gpus`, on libraries that fail as listed.
fn again(fails: &str, ranks: usize, gpus: usize) -> Output {
    let folder = tempfile::tempdir().unwrap();
    libraries(folder.path());
    let test = std::thread::current().name().unwrap().to_owned();
    Command::new(std::env::current_exe().unwrap())
        .args([&test, "--exact", "--nocapture", "--test-threads=1"])
        .env(RANKS, ranks.to_string())
        .env("FAKE_GPU", fails)
        .env("FAKE_GPUS", gpus.to_string())
        .env("ZEROTH_CUDA_LIBRARIES", folder.path())
        .env("XDG_CACHE_HOME", folder.path())
        .env("ZEROTH_GPU_CONNECT_SECONDS", "2")
        .env_remove("ZEROTH_GPU_COLLECTIVES")
        .output()
        .unwrap()
}

/// The number of ranks, in the process with the libraries.
fn ranks_here() -> Option<usize> {
    std::env::var(RANKS).ok().map(|ranks| ranks.parse().unwrap())
}

/// What each rank of this process says, in threads of one job.
fn on_ranks(ranks: usize, rank: impl Fn(Box<dyn Comm>, CudaDevice) -> String + Sync) -> Vec<String> {
    in_groups(ranks, ranks, rank)
}

/// The same, with ranks in groups.
fn in_groups(
    ranks: usize,
    group: usize,
    rank: impl Fn(Box<dyn Comm>, CudaDevice) -> String + Sync,
) -> Vec<String> {
    let job = LocalJob::create(ranks, 1 << 16).unwrap();
    let gpus: usize = std::env::var("FAKE_GPUS").unwrap().parse().unwrap();
    std::thread::scope(|scope| {
        let start = |number: usize| {
            let comm = job.join(number, &JoinOptions::default().group(group)).unwrap();
            let rank = &rank;
            scope.spawn(move || {
                let device = CudaDevice::open(number % gpus, ByTier::on_device(ARENA)).unwrap();
                rank(comm, device)
            })
        };
        let threads: Vec<_> = (0..ranks).map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Which transport all ranks chose, and why not an earlier one.
fn chosen(fails: &str, ranks: usize, gpus: usize) -> Option<String> {
    if let Some(ranks) = ranks_here() {
        let said = on_ranks(ranks, |comm, mut device| {
            let opened = GpuCollectives::open(None, Axis::Group, &mut device, &*comm).ok().unwrap();
            // Moments begin with what the arena holds.
            let mut found = vec![1; ARENA as usize];
            device.download(Queue::Compute, Span::device(0, ARENA), &mut found).unwrap();
            assert!(found.iter().all(|byte| *byte == 0), "tests of connections must leave zeros");
            match opened {
                Ok(open) => open.describe(),
                Err(reasons) => format!("host: {reasons}"),
            }
        });
        assert!(said.iter().all(|other| *other == said[0]), "{said:?}");
        println!("chosen: {}", said[0]);
        return None;
    }
    let output = again(fails, ranks, gpus);
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{fails}: {said}{}", String::from_utf8_lossy(&output.stderr));
    Some(said.lines().find_map(|line| Some(line.split_once("chosen: ")?.1.to_owned())).unwrap())
}

macro_rules! chooses {
    ($($name:ident: $fails:literal, $ranks:literal ranks on $gpus:literal gpus, $transport:literal, $($why:literal),*;)*) => {
        $(#[test]
        fn $name() {
            let Some(chosen) = chosen($fails, $ranks, $gpus) else { return };
            assert!(chosen.starts_with($transport), "{chosen}");
            $(assert!(chosen.contains($why), "{chosen}");)*
        })*
    };
}

chooses! {
    ranks_that_map_each_others_memory_use_it: "", 3 ranks on 3 gpus, "from GPU to GPU (CUDA IPC)",;
    ranks_on_one_gpu_map_each_others_memory: "", 2 ranks on 1 gpus, "from GPU to GPU (CUDA IPC)",;
    without_peer_access_nccl_is_next: "no_peer", 2 ranks on 2 gpus, "from GPU to GPU (NCCL", "error 217";
    a_ninth_peer_is_too_many: "few_peers", 10 ranks on 10 gpus, "from GPU to GPU (NCCL", "error 711";
    without_ipc_nccl_is_next: "no_ipc", 2 ranks on 2 gpus, "from GPU to GPU (NCCL", "error 801";
    wrong_bytes_are_found_when_memory_is_mapped: "corrupt_all", 2 ranks on 2 gpus, "from GPU to GPU (NCCL",
        "differs from the one that the rank wrote";
    wrong_bytes_are_found_by_an_exchange: "corrupt", 2 ranks on 2 gpus, "from GPU to GPU (NCCL",
        "gave wrong bytes from rank";
    counters_that_do_not_arrive_end_in_time: "deaf", 2 ranks on 2 gpus, "from GPU to GPU (NCCL",
        "not idle after 2 s";
    ranks_on_one_gpu_without_ipc_use_the_host: "no_ipc", 2 ranks on 1 gpus, "host: ",
        "ranks 0 and 1 are on the same GPU";
    a_communicator_that_does_not_open_is_no_failure: "no_ipc,init_fails", 2 ranks on 2 gpus, "host: ",
        "ncclCommInitRankConfig", "error 2";
    a_communicator_that_never_opens_is_given_up: "no_ipc,init_blocks", 2 ranks on 2 gpus, "host: ",
        "ncclCommInitRankConfig", "not returned in 2 s";
    an_exchange_that_fails_is_no_failure: "no_ipc,first_fails", 2 ranks on 2 gpus, "host: ", "ncclAllGather",
        "error 2";
    an_exchange_that_never_returns_is_given_up: "no_ipc,group_blocks", 2 ranks on 2 gpus, "host: ",
        "an exchange", "not returned in 2 s";
}

/// Which transports the ranks of a mesh choose along its axes.
fn chosen_along_axes(fails: &str, gpus: usize) -> Option<String> {
    const GROUP: usize = 3;
    if let Some(ranks) = ranks_here() {
        let said = in_groups(ranks, GROUP, |comm, mut device| {
            let mesh = comm.mesh().unwrap();
            let how = Axis::ALL.map(|axis| {
                let opened = GpuCollectives::open(None, axis, &mut device, mesh.along(axis)).ok().unwrap();
                (
                    opened
                        .as_ref()
                        .map_or_else(|reasons| format!("host: {reasons}"), GpuCollectives::describe),
                    opened,
                )
            });
            let [(group, _), (rail, _)] = &how;
            format!("{group}, {rail}")
        });
        // Reasons name the GPUs of an axis, which differ.
        let first = |said: &str| said.split(" (").next().unwrap_or_default().to_owned();
        assert!(said.iter().all(|other| first(other) == first(&said[0])), "{said:?}");
        println!("chosen: {}", said[0]);
        return None;
    }
    let output = again(fails, 2 * GROUP, gpus);
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{fails}: {said}{}", String::from_utf8_lossy(&output.stderr));
    Some(said.lines().find_map(|line| Some(line.split_once("chosen: ")?.1.to_owned())).unwrap())
}

#[test]
fn groups_and_rails_of_one_machine_map_memory_by_counters_of_their_own() {
    for gpus in [1, 6] {
        let Some(chosen) = chosen_along_axes("", gpus) else { return };
        assert_eq!(chosen, "from GPU to GPU (CUDA IPC), from GPU to GPU (CUDA IPC)");
    }
}

#[test]
fn groups_and_rails_of_one_machine_have_a_communicator_each() {
    let Some(chosen) = chosen_along_axes("no_ipc", 6) else { return };
    assert_eq!(chosen.matches("from GPU to GPU (NCCL").count(), 2, "{chosen}");
}

/// Rank 1 leaves while rank 0 connects; rank 0 then does not end by itself.
fn a_lost_rank_is_named(fails: &str) {
    if let Some(ranks) = ranks_here() {
        on_ranks(ranks, |comm, mut device| {
            if comm.rank() == 1 {
                // As in `GpuCollectives::open`, up to the handles.
                let barrier = comm.device_barrier().unwrap();
                publish(&*comm, "create device barrier", &Ok(Vec::new())).ok().unwrap().unwrap();
                let place = PeerPlace { rank: 1, one_host: true };
                let handle = device.ipc_handle(Axis::Group, Transport::Nccl, place).unwrap();
                publish(&*comm, "publish IPC handles", &Ok(handle)).ok().unwrap().unwrap();
                drop(barrier);
                return String::new();
            }
            let opened = GpuCollectives::open(Some(Transport::Nccl), Axis::Group, &mut device, &*comm);
            let Err(CollectiveError::Comm(error)) = opened else { panic!("rank 1 has left") };
            println!("named: {error}");
            std::thread::sleep(Duration::from_mins(1));
            String::new()
        });
        return;
    }
    let begun = Instant::now();
    let output = again(fails, 2, 2);
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(1), "{out}{err}");
    let named = out.lines().find(|line| line.contains("named: ")).unwrap_or_else(|| panic!("{out}{err}"));
    assert!(named.contains("rank 1") && named.contains("left the job"), "{named}");
    assert!(err.contains("rank 1") && err.contains("did not end by itself within 2 s"), "{err}");
    assert!(begun.elapsed() < Duration::from_secs(30), "it ended itself");
}

#[test]
fn a_rank_lost_while_others_join_is_named() {
    a_lost_rank_is_named("");
}

#[test]
fn a_rank_lost_while_nccl_blocks_is_named() {
    a_lost_rank_is_named("init_blocks,abort_blocks");
}
