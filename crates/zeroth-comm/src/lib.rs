//! Communication between ranks: traits whose collectives move bytes and never add, and their implementations: for
//! ranks of one machine over shared memory, for ranks of several hosts over MPI.
//!
//! - `comm.rs` lists the traits: [`Comm`], the communicator that a program runs on, and what it hands out. [`Transfer`]
//!   defines what each collective moves.
//! - [`local`] implements them over a shared-memory segment that connects processes (or threads, in tests).
//! - [`mpi`] implements [`Comm`] over MPI, for the ranks of several hosts.
//! - [`MeshComm`] composes a communicator of all ranks from those of groups and rails.
//! - [`launch`] starts the processes of a job and reports how each of them ended.
//! - [`environment`] detects ranks that another launcher started, and [`rendezvous`] connects those of one host.
//! - [`hosts`] connects the hosts of a job for everything but tensors: who takes part, who lives, what was decided.
//!
//! A rank that dies, stops or leaves is reported by name, with its step and operation, on every rank that waits for it.
//!
//! ```
//! use zeroth_comm::{JoinOptions, OpName, local::LocalJob};
//!
//! let job = LocalJob::create(2, 1 << 20)?;
//! std::thread::scope(|scope| {
//!     for rank in 0..2 {
//!         let comm = job.join(rank, &JoinOptions::default()).expect("each rank joins once");
//!         scope.spawn(move || {
//!             let mut all = [0; 3];
//!             let own: &[u8] = if rank == 0 { &[7] } else { &[8, 9] };
//!             let op = OpName::new(1, "gather", 0);
//!             comm.all_gather(op, own, &mut all, &[1, 2]).and_then(|handle| handle.wait()).expect("both are there");
//!             assert_eq!(all, [7, 8, 9]);
//!         });
//!     }
//! });
//! # Ok::<(), zeroth_comm::JoinError>(())
//! ```

// The model of collectives in `tests/it` is also that of unit tests.
#[cfg(test)]
extern crate self as zeroth_comm;

mod alone;
mod comm;
pub mod environment;
mod error;
pub mod hosts;
mod join_options;
pub mod launch;
pub mod local;
mod mesh;
pub mod mpi;
mod op_name;
mod place;
mod process;
mod progress;
pub mod rendezvous;
mod transfer;

pub use alone::alone;
pub use comm::{
    Comm, DeviceBarrier, DeviceCounters, Handle, JobControl, Liveness, MeshAxes, OnLost, PeerSlices,
    PendingTransfer, RankObservation, RankObserver, SharedWindows,
};
pub use error::{CommError, JoinError, LostReason, RankLost};
pub use join_options::{JoinOptions, Silence, SlowRank, Timing};
pub use mesh::MeshComm;
pub use op_name::{LastOp, OpName};
pub use place::{HostRanks, HostTable, MOST_HOSTS, Place, PlaceError};
pub use process::ProcessState;
pub use progress::RankPhase;
pub use transfer::Transfer;
