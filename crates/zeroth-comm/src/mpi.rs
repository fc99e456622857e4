//! MPI, opened at run time: communicators between CPU ranks of several hosts.
//!
//! One binary runs with Open MPI, with MPICH and without both. The library is the one that belongs to the launcher that
//! started this process; its binary interface is told by what it exports. MPI only moves bytes: sums are our own kernels.
//!
//! - **Order.** [`Mpi::init`] comes first in the process, before its signal handlers and threads. UCX, which both
//!   libraries may use, takes SIGHUP and the signals of crashes when it is loaded, and MPICH takes SIGUSR1; `init` puts
//!   back the dispositions that it found; SIGUSR1 is then ignored until a handler is installed, see `dispositions.rs`.
//! - **Threads.** MPI is initialized with `MPI_THREAD_SERIALIZED`: any thread may use a communicator, one at a time.
//! - **Lost ranks.** MPI reports none: after a kill, a stop or a cut cable `MPI_Test` just never completes. A
//!   communicator therefore polls, and asks its [`Watch`] every 10 ms whether the job has ended.
//! - **Leaving.** [`Mpi::leave`] ends MPI under a deadline, because `MPI_Finalize` may hang. Dropping [`Mpi`] calls nothing.
//!
//! A communicator over MPI has no windows, no device barrier and no control plane.

mod calls;
mod dispositions;
mod error;
mod exchange;
mod finalize;
mod launched_by;
mod library;
mod rail_comm;
mod rounds;
mod session;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use crate::comm::Comm;
use crate::error::CommError;
use crate::op_name::OpName;
use calls::{Code, THREAD_SERIALIZED};
use dispositions::Dispositions;
use launched_by::LaunchedBy;
use library::MpiLibrary;
use rail_comm::RailComm;
use rounds::TransferRounds;
use session::Session;

pub use error::MpiError;
pub use library::LIBRARY_VARIABLE;

/// Tells whether the job has ended: an error is the verdict, for the rank that was in this collective.
pub type Watch = Arc<dyn Fn(OpName) -> Result<(), CommError> + Send + Sync>;

/// How long the ranks have to take part in a broadcast or a split: all of them start together.
const TOGETHER: Duration = Duration::from_mins(1);

/// How often the end of a call on another thread is awaited before the watch is asked.
const WATCHED: Duration = Duration::from_millis(10);

/// MPI can be initialized once in the life of a process.
static INITIALIZED: AtomicBool = AtomicBool::new(false);

/// MPI in this process.
pub struct Mpi {
    session: Arc<Session>,
    rank: usize,
    size: usize,
}

/// How MPI was left. In both cases end the process with `_exit`: exit handlers of the library may hang.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Left {
    /// With all ranks: the launcher counts the process's end as regular.
    Finalized,
    /// Not in time, or not at all because an operation was given up before: the launcher may report the process's end as
    /// that of a failed rank, and kill the others.
    TimedOut,
}

impl Mpi {
    /// Opens the library and initializes it, which returns once all ranks of the launcher have done so. Call it first in
    /// the process.
    ///
    /// Fails where no library is found, where the one found does not connect to the launcher that the environment names,
    /// and on a second call.
    pub fn init() -> Result<Self, MpiError> {
        if INITIALIZED.swap(true, Ordering::AcqRel) {
            return Err(MpiError::Twice);
        }
        let before = Dispositions::save();
        let initialized = Self::init_library();
        before.restore();
        initialized
    }

    fn init_library() -> Result<Self, MpiError> {
        let launcher = LaunchedBy::find(|name| std::env::var_os(name));
        let library = MpiLibrary::open(launcher.as_ref(), &launched_by::folders_of_ancestors())?;
        let name = library.name.clone();
        let failed = |call: &'static str| {
            let (calls, library) = (&library.calls, &name);
            move |code: Code| MpiError::Call {
                library: library.clone(),
                call,
                reason: calls.error_text(code),
            }
        };
        let provided = library.calls.init().map_err(failed("MPI_Init_thread"))?;
        let world = library.calls.world();
        let (rank, size) = library.calls.place(world).map_err(failed("MPI_Comm_rank"))?;
        library.calls.return_errors(world).map_err(failed("MPI_Comm_set_errhandler"))?;
        if let Some((variable, expected)) = launcher.and_then(|launcher| launcher.world)
            && expected != size
        {
            return Err(MpiError::World { library: name, variable, expected, found: size });
        }
        if provided < THREAD_SERIALIZED {
            return Err(MpiError::Threads { library: name, provided });
        }
        Ok(Self { session: Arc::new(Session::new(library)), rank, size })
    }

    /// This rank and the number of ranks.
    pub fn world(&self) -> (usize, usize) {
        (self.rank, self.size)
    }

    /// The library: its version, and where it was found.
    pub fn library(&self) -> &str {
        &self.session.library
    }

    /// Says how many ranks run on this host, with how many threads each. Where they exceed its CPUs, a rank that waits
    /// sleeps between tests, which is also what it does before this call.
    pub fn share_host(&self, ranks: usize, threads: usize) {
        let allowed = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        self.session.set_shares_cpus(ranks.saturating_mul(threads) > allowed);
    }

    /// Sends the bytes of `root` to all ranks: what is needed before there is a watch. Elsewhere `bytes` is replaced.
    ///
    /// Fails after a minute if a rank does not take part.
    pub fn broadcast(&self, root: usize, bytes: &mut Vec<u8>) -> Result<(), MpiError> {
        let began = Instant::now();
        let library = self.session.library.clone();
        let seconds = TOGETHER.as_secs();
        let watch: Watch = Arc::new(move |op| {
            if began.elapsed() < TOGETHER {
                return Ok(());
            }
            let reason = format!("{library}: no answer for {seconds} s; a rank does not take part");
            Err(CommError::Library { op, call: "MPI_Ibcast", reason })
        });
        let world = self.session.calls().map(|calls| calls.world());
        let world = world.ok_or_else(|| self.closed("MPI_Ibcast"))?;
        let comm = RailComm::new(
            Arc::clone(&self.session),
            world,
            self.world(),
            TransferRounds::new(self.size),
            watch,
        );
        let mut length = (bytes.len() as u64).to_le_bytes();
        let send = |buffer: &mut [u8]| {
            let transfer = crate::Transfer::Broadcast { root, buffer };
            comm.start(OpName::new(0, "broadcast", 0), transfer)?.wait()
        };
        send(&mut length)?;
        bytes.resize(u64::from_le_bytes(length) as usize, 0);
        send(bytes)?;
        Ok(())
    }

    /// A communicator of the ranks that give the same `color`, in the order of their keys, which asks `watch` whenever it
    /// waits. All ranks call it.
    pub fn split(&self, color: usize, key: usize, watch: Watch) -> Result<Box<dyn Comm>, MpiError> {
        // MPI has no split that is polled. The watch is asked meanwhile; a call that is given up keeps its thread.
        let (done, result) = mpsc::channel();
        let session = Arc::clone(&self.session);
        let split = move || {
            let calls = session.calls()?;
            let made = calls.split(color as i32, key as i32).and_then(|communicator| {
                calls.return_errors(communicator)?;
                Ok((communicator, calls.place(communicator)?))
            });
            Some(made.map_err(|code| calls.error_text(code)))
        };
        let spawned = std::thread::Builder::new().name("MPI_Comm_split".to_owned()).spawn(move || {
            // Nobody listens after the watch has ended the job.
            let _ = done.send(split());
        });
        let failed = |reason: String| MpiError::Call {
            library: self.session.library.clone(),
            call: "MPI_Comm_split",
            reason,
        };
        spawned.map_err(|error| failed(error.to_string()))?;
        let op = OpName::new(0, "split", 0);
        let made = loop {
            match result.recv_timeout(WATCHED) {
                Ok(made) => break made,
                Err(mpsc::RecvTimeoutError::Disconnected) => break None,
                Err(mpsc::RecvTimeoutError::Timeout) => {
                    if let Err(cause) = watch(op) {
                        self.session.give_up();
                        return Err(cause.into());
                    }
                }
            }
        };
        let (communicator, place) = made.ok_or_else(|| self.closed("MPI_Comm_split"))?.map_err(failed)?;
        let rounds = TransferRounds::new(place.1);
        Ok(Box::new(RailComm::new(Arc::clone(&self.session), communicator, place, rounds, watch)))
    }

    /// Ends MPI: all ranks call it, together, after their last collective. Communicators fail from then on.
    ///
    /// `MPI_Finalize` runs on a thread of its own, because it may hang though all ranks are there.
    pub fn leave(self, deadline: Duration) -> Left {
        let (done, result) = mpsc::channel();
        if !self.session.close() {
            return Left::TimedOut;
        }
        let (session, end) = (Arc::clone(&self.session), Instant::now() + deadline);
        let finalize = move || {
            let finalized = finalize::finalize(&**session.closed_calls(), &session.library, end);
            // Nobody listens after the deadline.
            let _ = done.send(finalized);
        };
        let spawned = std::thread::Builder::new().name("MPI_Finalize".to_owned()).spawn(finalize);
        match spawned.map(|_| result.recv_timeout(deadline)) {
            Ok(Ok(true)) => Left::Finalized,
            _ => Left::TimedOut,
        }
    }

    fn closed(&self, call: &'static str) -> MpiError {
        let reason = "an operation was given up before".to_owned();
        MpiError::Call { library: self.session.library.clone(), call, reason }
    }
}

#[cfg(test)]
mod tests;
