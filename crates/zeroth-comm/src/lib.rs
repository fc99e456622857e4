//! Communication between ranks: a trait whose collectives move bytes and never add, and an implementation for ranks of
//! one machine over shared memory.
//!
//! - [`Comm`] is the communicator that a program runs on; [`Transfer`] defines what each collective moves.
//! - [`Windows`] are memory that peers on one machine map read-only, so that a collective is a single pass.
//! - [`DeviceBarrier`] is a barrier between the ranks' devices that does not involve their hosts.
//! - [`local`] connects processes (or threads, in tests) over a shared-memory segment.
//! - [`launch`] starts the processes of a job and reports how each of them ended.
//! - [`environment`] detects ranks that another launcher started, and [`rendezvous`] connects them.
//!
//! A rank that dies, stops or leaves is reported by name, with its step and operation, on every rank that waits for it.
//!
//! ```
//! use zeroth_comm::{Comm, OpName, local::{Job, Options}};
//!
//! let job = Job::create(2, 1 << 20)?;
//! std::thread::scope(|scope| {
//!     for rank in 0..2 {
//!         let comm = job.join(rank, &Options::default()).expect("each rank joins once");
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

mod comm;
mod copy;
mod device_barrier;
pub mod environment;
mod error;
mod first_step;
mod heartbeat;
mod job_requests;
pub mod launch;
pub mod local;
mod observer;
mod op_name;
mod peer_monitor;
mod progress;
mod rank_slot;
pub mod rendezvous;
mod segment;
mod shm_channel;
mod wait;
mod windows;

pub use comm::{Comm, Finish, Handle, Transfer};
pub use device_barrier::DeviceBarrier;
pub use error::{CommError, JoinError, LostReason, RankLost};
pub use first_step::FirstStep;
pub use job_requests::JobRequests;
pub use observer::{ProcessState, RankObservation, RankObserver};
pub use op_name::{LastOp, OpName};
pub use peer_monitor::{Silence, SlowRank, Timing};
pub use progress::{Phase, ProgressCell};
pub use segment::Token;
pub use windows::{PeerSlices, Windows};
