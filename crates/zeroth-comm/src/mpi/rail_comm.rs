//! A communicator over MPI, for the ranks of a rail.
//!
//! A collective begins when it is waited for: a handle that is dropped or forgotten leaves nothing behind that MPI still
//! writes to. It is polled with `MPI_Test`, and the watch decides whether the job has ended: MPI does not notice a rank
//! that was killed, stopped or cut off.

use std::cell::{Cell, RefCell};
use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant};

use super::Watch;
use super::calls::{Calls, Code, Communicator, MpiRequest};
use super::exchange::Operands;
use super::rounds::TransferRounds;
use super::session::Session;
use crate::alone::alone;
use crate::comm::{Comm, Handle, JobControl, PendingTransfer};
use crate::error::CommError;
use crate::op_name::OpName;
use crate::transfer::Transfer;

/// How often a rank that waits asks the watch.
const WATCHED: Duration = Duration::from_millis(10);

/// How long an error of MPI waits for the verdict on its cause: longer than a silent rank is waited for.
const VERDICT: Duration = Duration::from_secs(10);

/// Tests before the first sleep, where CPUs are shared.
const TESTS: u32 = 20;

/// A sleep between tests, where CPUs are shared.
const SLEEP: Duration = Duration::from_micros(20);

/// One rank of a rail.
pub(super) struct RailComm {
    session: Arc<Session>,
    pub(super) communicator: Communicator,
    pub(super) rank: usize,
    pub(super) world: usize,
    pub(super) rounds: TransferRounds,
    watch: Watch,
    started: Cell<u64>,
    finished: Cell<u64>,
    /// The collective that this rank gave up.
    abandoned: Cell<Option<OpName>>,
    pub(super) operands: RefCell<Operands>,
}

impl RailComm {
    pub(super) fn new(
        session: Arc<Session>,
        communicator: Communicator,
        (rank, world): (usize, usize),
        rounds: TransferRounds,
        watch: Watch,
    ) -> Self {
        Self {
            session,
            communicator,
            rank,
            world,
            rounds,
            watch,
            started: Cell::new(0),
            finished: Cell::new(0),
            abandoned: Cell::new(None),
            operands: RefCell::default(),
        }
    }

    /// Fails once the job has ended, or once this rank gave up a collective.
    fn check(&self, op: OpName) -> Result<(), CommError> {
        match self.abandoned.get() {
            Some(op) => Err(CommError::Abandoned { op }),
            None => (self.watch)(op),
        }
    }

    fn calls(&self, op: OpName) -> Result<MutexGuard<'_, Box<dyn Calls>>, CommError> {
        self.session.calls().ok_or_else(|| CommError::Library {
            op,
            call: "a collective",
            reason: format!("{} was left before", self.session.library),
        })
    }

    /// The error of a call. A rank that is lost may show as one, so the watch is asked for the cause first.
    fn failed(&self, op: OpName, call: &'static str, code: Code) -> CommError {
        let reason = self.session.calls().map(|calls| calls.error_text(code)).unwrap_or_default();
        self.session.give_up();
        let began = Instant::now();
        while began.elapsed() < VERDICT {
            if let Err(cause) = self.check(op) {
                return cause;
            }
            std::thread::sleep(WATCHED);
        }
        CommError::Library { op, call, reason: format!("{}: {reason}", self.session.library) }
    }

    /// Starts an operation and adds its request.
    pub(super) fn begin(
        &self,
        op: OpName,
        call: &'static str,
        requests: &mut Vec<MpiRequest>,
        start: impl FnOnce(&dyn Calls) -> Result<MpiRequest, Code>,
    ) -> Result<(), CommError> {
        let started = start(&**self.calls(op)?);
        requests.push(started.map_err(|code| self.failed(op, call, code))?);
        Ok(())
    }

    /// Polls until all operations are complete. After an error MPI is not called again by this process: nothing makes
    /// progress then, so nothing is written to buffers that their owner takes back.
    pub(super) fn complete(
        &self,
        op: OpName,
        call: &'static str,
        requests: &mut Vec<MpiRequest>,
    ) -> Result<(), CommError> {
        let shares_cpus = self.session.shares_cpus();
        let mut watched = Instant::now();
        let mut tests = 0_u32;
        while let Some(request) = requests.last_mut() {
            let tested = self.calls(op)?.test(request);
            match tested {
                Ok(true) => {
                    requests.pop();
                    continue;
                }
                Ok(false) => tests = tests.saturating_add(1),
                Err(code) => return Err(self.failed(op, call, code)),
            }
            if shares_cpus && tests > TESTS {
                std::thread::sleep(SLEEP);
            }
            if watched.elapsed() >= WATCHED {
                if let Err(cause) = self.check(op) {
                    self.session.give_up();
                    return Err(cause);
                }
                watched = Instant::now();
            }
        }
        Ok(())
    }
}

impl Comm for RailComm {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world(&self) -> usize {
        self.world
    }

    fn start<'a>(&'a self, op: OpName, transfer: Transfer<'a>) -> Result<Handle<'a>, CommError> {
        transfer.check(op, self.rank, self.world)?;
        self.check(op)?;
        let ticket = self.started.get();
        self.started.set(ticket + 1);
        Ok(Handle::new(self, ticket, op, transfer))
    }

    /// A rail has no control plane of its own: that of the job is over all hosts.
    fn control(&self) -> Box<dyn JobControl> {
        alone()
    }
}

impl PendingTransfer for RailComm {
    fn finish(&self, ticket: u64, op: OpName, transfer: &mut Transfer<'_>) -> Result<(), CommError> {
        self.check(op)?;
        if ticket != self.finished.get() {
            // The handle is consumed: this rank can no longer complete it.
            self.abandon(op);
            return Err(CommError::OutOfOrder { op });
        }
        self.move_all(op, transfer)?;
        self.finished.set(ticket + 1);
        Ok(())
    }

    fn abandon(&self, op: OpName) {
        self.abandoned.set(Some(op));
    }
}
