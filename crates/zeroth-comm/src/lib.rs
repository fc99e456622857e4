//! How ranks talk: one trait whose collectives move bytes and never add, and ranks of one machine over shared memory.
//!
//! - [`Comm`] is what a program runs on; [`Transfer`] says exactly what each collective moves.
//! - [`Windows`] are memory that ranks of one machine read in each other's hands: one pass instead of two.
//! - [`DeviceBarrier`] is where the devices of ranks meet, while their hosts are elsewhere.
//! - [`local`] joins processes (or threads, for tests) over one shared segment.
//! - [`launch`] starts the processes of a job and says how each of them ended.
//! - [`environment`] finds the place of a process that another launcher started, and [`rendezvous`] brings those together.
//!
//! A rank that dies, stops or leaves is named, with its step and op, on every rank that waits: never a silent hang.
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
mod lanes;
pub mod launch;
pub mod local;
pub mod rendezvous;
mod segment;
mod slot;
mod wait;
mod watch;
mod windows;

pub use comm::{Comm, Finish, Handle, OpName, Transfer};
pub use device_barrier::DeviceBarrier;
pub use error::{CommError, JoinError, Lost, OpSeen, RankLost};
pub use first_step::FirstStep;
pub use segment::Token;
pub use watch::{Slow, Timing};
pub use windows::{Peers, Windows};
