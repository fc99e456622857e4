//! The thread that holds the control connections of a process, and how others talk to it.
//!
//! A reader thread for each connection blocks until bytes come, so that a connection that closes is noticed at once, and passes
//! messages on; sending never blocks. Only differences of this machine's monotonic clock are used, and no time is sent.

use std::io;
use std::net::TcpStream;
use std::sync::mpsc::{Receiver, RecvError, RecvTimeoutError, Sender, SyncSender};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::chunks::{Inbox, Outbox};
use super::frame::{FrameError, Opener, Sealer};
use super::local_host::LocalHost;
use super::message::{HostMessage, Topic};
use crate::comm::RankObservation;
use crate::error::{LostReason, RankLost};
use crate::place::HostTable;

/// How often the ranks of a host are looked at.
pub(super) const TICK: Duration = Duration::from_millis(50);
/// Polling interval while something is to be sent that a connection does not take.
const UNSENT: Duration = Duration::from_millis(2);
/// How long a thread that ends still sends what is left.
pub(super) const LAST: Duration = Duration::from_secs(2);
/// Readers need little stack.
const STACK: usize = 256 << 10;

/// Where the parts of all hosts go.
pub(super) type WholeReply = SyncSender<Arc<[u8]>>;

/// What a control thread is told.
pub(super) enum ControlEvent {
    /// A peer has proven the token.
    Proven {
        stream: TcpStream,
        sealer: Sealer,
        opener: Opener,
    },
    /// A connection came from something else.
    Stranger(String),
    Message {
        peer: usize,
        message: HostMessage,
    },
    Closed {
        peer: usize,
        why: FrameError,
    },
    Order(ControlOrder),
}

/// What the process of a control thread asks of it.
pub(super) enum ControlOrder {
    /// The ranks of this host, once their segment is there.
    Attach(Box<LocalHost>),
    /// The job begins with these settings: for the coordinator.
    Begin(Arc<[u8]>),
    /// The job is cancelled: for the coordinator.
    Refuse(String),
    /// This host's part of a gather; the parts of all hosts come back.
    Gather(Vec<u8>, WholeReply),
    /// This host is done; the answer comes when all are.
    Leave(SyncSender<()>),
    /// The thread ends.
    Quit,
    /// The connection breaks as if the process had died.
    #[cfg(test)]
    Break,
    /// Nothing is sent or heard, as behind a link that is cut.
    #[cfg(test)]
    Mute,
}

/// What a control thread publishes.
#[derive(Default)]
pub(super) struct ControlView {
    /// The hosts, once all have come.
    pub(super) table: Option<HostTable>,
    /// Ranks whose hosts have not come, and what came instead.
    pub(super) missing: Vec<usize>,
    pub(super) strangers: Vec<String>,
    pub(super) lost: Option<RankLost>,
    /// Why the job cannot begin.
    pub(super) refused: Option<String>,
    pub(super) rejected: Option<String>,
    /// What the coordinator has sent to begin with.
    pub(super) begun: Option<Vec<u8>>,
    /// What other hosts have said of their ranks.
    pub(super) seen: Vec<Option<RankObservation>>,
}

/// State that a control thread shares with its process.
#[derive(Default)]
pub(super) struct LinkState {
    view: Mutex<ControlView>,
    changed: Condvar,
}

impl LinkState {
    /// No one panics while holding it.
    pub(super) fn lock(&self) -> MutexGuard<'_, ControlView> {
        self.view.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn change(&self, change: impl FnOnce(&mut ControlView)) {
        change(&mut self.lock());
        self.changed.notify_all();
    }

    /// Waits for a change, at most so long.
    pub(super) fn wait<'a>(
        &self,
        view: MutexGuard<'a, ControlView>,
        most: Duration,
    ) -> MutexGuard<'a, ControlView> {
        self.changed.wait_timeout(view, most).unwrap_or_else(PoisonError::into_inner).0
    }
}

/// A running control thread; dropping it ends the thread, once what was ordered is sent.
pub(super) struct ControlThread {
    pub(super) orders: Sender<ControlEvent>,
    pub(super) state: Arc<LinkState>,
    pub(super) thread: Option<JoinHandle<()>>,
}

impl ControlThread {
    pub(super) fn order(&self, order: ControlOrder) {
        // A thread that has ended has said why in its state, or will not be asked again.
        let _ = self.orders.send(ControlEvent::Order(order));
    }
}

impl Drop for ControlThread {
    fn drop(&mut self) {
        self.order(ControlOrder::Quit);
        if let Some(thread) = self.thread.take() {
            // It does not panic, and the process is leaving anyway.
            let _ = thread.join();
        }
    }
}

/// Starts the thread that reads a connection until it closes.
pub(super) fn read_peer(
    peer: usize,
    stream: TcpStream,
    mut opener: Opener,
    events: Sender<ControlEvent>,
) -> io::Result<()> {
    stream.set_read_timeout(None)?;
    let read = move || {
        let mut stream = io::BufReader::new(stream);
        loop {
            let message = opener
                .open(&mut stream)
                .and_then(|bytes| HostMessage::of_bytes(&bytes).ok_or(FrameError::Message));
            let (event, is_last) = match message {
                Ok(message) => (ControlEvent::Message { peer, message }, false),
                Err(why) => (ControlEvent::Closed { peer, why }, true),
            };
            if events.send(event).is_err() || is_last {
                return;
            }
        }
    };
    small_thread(format!("control reader {peer}"), read).map(drop)
}

pub(super) fn small_thread(name: String, run: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name(name).stack_size(STACK).spawn(run)
}

/// A connection to another host.
pub(super) struct HostPeer {
    pub(super) outbox: Outbox,
    inbox: Inbox,
    /// How long nothing was heard, as far as this process ran meanwhile.
    pub(super) silent: Duration,
}

impl HostPeer {
    pub(super) fn new(stream: TcpStream, sealer: Sealer) -> Self {
        Self { outbox: Outbox::new(stream, sealer), inbox: Inbox::default(), silent: Duration::ZERO }
    }

    /// Takes a chunk; the whole, once it is the last one. `None` inside of `Err` where chunks do not fit.
    pub(super) fn take(
        &mut self,
        topic: Topic,
        total: u32,
        bytes: &[u8],
    ) -> Result<Option<(Topic, Vec<u8>)>, ()> {
        self.inbox.take(topic, total, bytes).map_err(drop)
    }
}

/// Why a host is lost whose connection ended.
pub(super) fn reason_of(why: &FrameError, silent: Duration) -> LostReason {
    match why {
        FrameError::Closed => LostReason::Dead,
        FrameError::Io(_) => LostReason::HostSilent { seconds: silent.as_secs() as u32 },
        FrameError::Length(_) | FrameError::Tag | FrameError::Message => LostReason::BadFrame,
    }
}

/// The next event; none for a moment; an error once nobody is left to order anything.
pub(super) fn next_event(
    events: &Receiver<ControlEvent>,
    has_unsent: bool,
    most: Duration,
) -> Result<Option<ControlEvent>, RecvError> {
    match events.recv_timeout(if has_unsent { UNSENT } else { most }) {
        Ok(event) => Ok(Some(event)),
        Err(RecvTimeoutError::Timeout) => Ok(None),
        Err(RecvTimeoutError::Disconnected) => Err(RecvError),
    }
}

/// The time between two looks.
pub(super) struct TickClock(Instant);

impl TickClock {
    pub(super) fn start() -> Self {
        Self(Instant::now())
    }

    /// The time since the last tick, if one is due.
    pub(super) fn due(&mut self, now: Instant, interval: Duration) -> Option<Duration> {
        let passed = now.duration_since(self.0);
        (passed >= interval).then(|| {
            self.0 = now;
            passed
        })
    }
}
