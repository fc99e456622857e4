//! The thread of a leader: tells the coordinator of its host's ranks, and its ranks of the coordinator's decisions.

use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, SyncSender};
use std::time::{Duration, Instant};

use super::Rank0Address;
use super::chunks::MOST_BYTES;
use super::control_thread::{
    ControlEvent, ControlOrder, HostPeer, LAST, LinkState, TICK, TickClock, WholeReply, next_event,
    read_peer, reason_of,
};
use super::frame::{FrameError, Opener, Sealer};
use super::handshake::{self, HandshakeError};
use super::local_host::LocalHost;
use super::message::{BEATS, HostMessage, Topic, VERSION};
use super::token::TokenSource;
use crate::error::{LostReason, RankLost};
use crate::join_options::Timing;
use crate::local::COUNTED;
use crate::op_name::LastOp;
use crate::place::Place;

/// What is said of a peer with another token.
pub(super) const OTHER_TOKEN: &str = "does not know this job's token";
/// Time for a connection to open.
const CONNECT: Duration = Duration::from_secs(2);

/// A connection to a coordinator that has proven the token, and let this host in.
pub(super) struct Admitted {
    stream: TcpStream,
    sealer: Sealer,
    opener: Opener,
    pid: u32,
    name: String,
}

/// Why no coordinator has let this host in yet.
pub(super) enum NotAdmitted {
    /// Worth another attempt; what was seen.
    Yet(String),
    /// It says no.
    Rejected(String),
    Refused(String),
}

/// Tries the addresses and ports of rank 0 once.
pub(super) fn attempt(
    address: &Rank0Address,
    token: &TokenSource,
    place: Place,
    name: &str,
) -> Result<Admitted, NotAdmitted> {
    let yet = |what: String| NotAdmitted::Yet(what);
    let token = token.load().map_err(|error| yet(error.to_string()))?;
    let addresses = address.resolve().map_err(|error| yet(format!("{}: {error}", address.host)))?;
    let mut seen = Vec::new();
    for at in addresses.iter().flat_map(|ip| address.port.ports().map(|port| SocketAddr::new(*ip, port))) {
        let stream = match TcpStream::connect_timeout(&at, CONNECT) {
            Ok(stream) => stream,
            // Nobody listens there, or not yet.
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionRefused => continue,
            Err(error) => {
                seen.push(format!("{at}: {error}"));
                continue;
            }
        };
        match handshake::prove(&stream, token) {
            Ok((sealer, opener)) => return introduce(stream, sealer, opener, place, name),
            Err(HandshakeError::Token) => seen.push(format!("{at} {OTHER_TOKEN}")),
            Err(error) => seen.push(format!("{at}: {error}")),
        }
    }
    if seen.is_empty() {
        seen.push("nobody listens there".to_owned());
    }
    Err(yet(seen.join("; ")))
}

/// Says which ranks this host has.
fn introduce(
    stream: TcpStream,
    mut sealer: Sealer,
    mut opener: Opener,
    place: Place,
    name: &str,
) -> Result<Admitted, NotAdmitted> {
    use std::io::Write as _;
    let number = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
    let hello = HostMessage::Hello {
        version: VERSION,
        world: number(place.world),
        first: number(place.first()),
        ranks: number(place.local_world),
        pid: std::process::id(),
        name: name.to_owned(),
    };
    let mut frame = Vec::new();
    sealer.seal(&hello.to_bytes(), &mut frame);
    let said = stream
        .set_nodelay(true)
        .and_then(|()| stream.set_read_timeout(Some(handshake::PATIENCE)))
        .and_then(|()| (&stream).write_all(&frame))
        .map_err(FrameError::Io)
        .and_then(|()| opener.open(&mut &stream));
    match said.map(|bytes| HostMessage::of_bytes(&bytes)) {
        Ok(Some(HostMessage::Welcome { pid, name })) => Ok(Admitted { stream, sealer, opener, pid, name }),
        Ok(Some(HostMessage::Rejected(reason))) => Err(NotAdmitted::Rejected(reason)),
        Ok(Some(HostMessage::Refused(reason))) => Err(NotAdmitted::Refused(reason)),
        Ok(_) => Err(NotAdmitted::Yet("rank 0 answered with something else".to_owned())),
        Err(error) => Err(NotAdmitted::Yet(error.to_string())),
    }
}

/// A leader's thread.
pub(super) struct LeaderThread {
    place: Place,
    timing: Timing,
    peer: HostPeer,
    is_open: bool,
    /// Rank 0's process and host, for the day on which they are lost.
    pid: u32,
    name: String,
    /// Where rank 0 was last.
    last: Option<LastOp>,
    local: Option<Box<LocalHost>>,
    lost: Option<RankLost>,
    is_refused: bool,
    gather: Option<WholeReply>,
    leave: Option<SyncSender<()>>,
    is_over: bool,
    #[cfg(test)]
    is_muted: bool,
    quits: Option<Instant>,
    is_sent: bool,
    tick: TickClock,
    beat: TickClock,
    events: Receiver<ControlEvent>,
    state: Arc<LinkState>,
}

impl LeaderThread {
    pub(super) fn new(
        admitted: Admitted,
        place: Place,
        timing: Timing,
        events: (Sender<ControlEvent>, Receiver<ControlEvent>),
        state: Arc<LinkState>,
    ) -> std::io::Result<Self> {
        let Admitted { stream, sealer, opener, pid, name } = admitted;
        read_peer(0, stream.try_clone()?, opener, events.0)?;
        Ok(Self {
            place,
            timing,
            peer: HostPeer::new(stream, sealer),
            is_open: true,
            pid,
            name,
            last: None,
            local: None,
            lost: None,
            is_refused: false,
            gather: None,
            leave: None,
            is_over: false,
            #[cfg(test)]
            is_muted: false,
            quits: None,
            is_sent: true,
            tick: TickClock::start(),
            beat: TickClock::start(),
            events: events.1,
            state,
        })
    }

    /// Runs until it is told to quit.
    pub(super) fn run(mut self) {
        loop {
            match next_event(&self.events, !self.is_sent, TICK) {
                Ok(Some(event)) => {
                    self.handle(event);
                    while let Ok(event) = self.events.try_recv() {
                        self.handle(event);
                    }
                }
                Ok(None) => {}
                Err(_) => return,
            }
            let now = Instant::now();
            if let Some(passed) = self.tick.due(now, TICK) {
                self.look(passed);
            }
            if self.beat.due(now, self.timing.heartbeat).is_some() {
                self.beat(now);
            }
            self.is_sent = !self.is_open || self.peer.outbox.flush();
            if self.quits.is_some_and(|since| self.is_sent || since.elapsed() >= LAST) {
                return;
            }
        }
    }

    fn handle(&mut self, event: ControlEvent) {
        #[cfg(test)]
        if self.is_muted && matches!(event, ControlEvent::Message { .. } | ControlEvent::Closed { .. }) {
            return;
        }
        match event {
            ControlEvent::Message { message, .. } => {
                self.peer.silent = Duration::ZERO;
                if self.is_open {
                    self.hear(message);
                }
            }
            ControlEvent::Closed { why, .. } => {
                if std::mem::replace(&mut self.is_open, false) {
                    self.lose_coordinator(reason_of(&why, self.peer.silent));
                }
            }
            ControlEvent::Order(order) => self.obey(order),
            // A leader takes no connections.
            ControlEvent::Proven { .. } | ControlEvent::Stranger(_) => {}
        }
    }

    fn obey(&mut self, order: ControlOrder) {
        match order {
            ControlOrder::Attach(local) => {
                self.local = Some(local);
                if let (Some(lost), Some(local)) = (&self.lost, &mut self.local) {
                    local.end(lost);
                }
            }
            ControlOrder::Gather(part, reply) => {
                // A reply that is dropped says that there is none; a longer part is refused before.
                if self.lost.is_none() && part.len() <= MOST_BYTES {
                    self.peer.outbox.push_long(Topic::Part, part.into());
                    self.gather = Some(reply);
                }
            }
            ControlOrder::Leave(reply) => {
                if self.lost.is_none() {
                    self.peer.outbox.push(&HostMessage::Leaving);
                    self.leave = Some(reply);
                }
            }
            ControlOrder::Quit => {
                // What a rank of this host has just reported is still passed on.
                self.look(Duration::ZERO);
                if !self.is_over && self.lost.is_none() {
                    self.peer.outbox.push(&HostMessage::Gone);
                }
                self.quits = Some(Instant::now());
            }
            // The coordinator's.
            ControlOrder::Begin(_) | ControlOrder::Refuse(_) => {}
            #[cfg(test)]
            ControlOrder::Break => self.peer.outbox.close(),
            #[cfg(test)]
            ControlOrder::Mute => self.is_muted = true,
        }
    }

    fn hear(&mut self, message: HostMessage) {
        match message {
            HostMessage::Beat { last } => self.last = last,
            HostMessage::Lost(lost) if lost.rank < self.place.world => self.lose(lost),
            HostMessage::State { first_step, stop, saves } => {
                if let Some(local) = &self.local {
                    local.apply(first_step, stop, saves);
                }
            }
            HostMessage::AllLeft => {
                self.is_over = true;
                if let Some(reply) = self.leave.take() {
                    let _ = reply.send(());
                }
            }
            HostMessage::Refused(reason) => {
                self.is_refused = true;
                self.state.change(|view| view.refused = Some(reason));
            }
            HostMessage::Chunk { topic: topic @ (Topic::Begin | Topic::Whole), total, bytes } => {
                match self.peer.take(topic, total, &bytes) {
                    Ok(None) => {}
                    Ok(Some((Topic::Begin, bytes))) => self.state.change(|view| view.begun = Some(bytes)),
                    Ok(Some((_, bytes))) => match self.gather.take() {
                        Some(reply) => {
                            let _ = reply.send(bytes.into());
                        }
                        None => self.not_of_this_job(),
                    },
                    Err(()) => self.not_of_this_job(),
                }
            }
            _ => self.not_of_this_job(),
        }
    }

    fn not_of_this_job(&mut self) {
        self.lose_coordinator(LostReason::BadFrame);
    }

    fn lose_coordinator(&mut self, reason: LostReason) {
        if self.is_over || self.is_refused {
            return;
        }
        let (host, pid, last) = (self.name.clone(), self.pid, self.last.clone());
        self.lose(RankLost { rank: 0, host, pid, reason, last, by: None, waiting_in: None });
        #[cfg(test)]
        if self.is_muted {
            return;
        }
        // The coordinator learns of it by the connection, whatever its state.
        self.peer.outbox.close();
        self.is_open = false;
    }

    fn lose(&mut self, lost: RankLost) {
        if self.lost.is_some() || self.is_over {
            return;
        }
        if let Some(local) = &mut self.local {
            local.end(&lost);
        }
        self.state.change(|view| view.lost = Some(lost.clone()));
        self.lost = Some(lost);
        (self.gather, self.leave) = (None, None);
    }

    /// Looks at the ranks of this host, and at the silence of the coordinator.
    fn look(&mut self, passed: Duration) {
        if self.is_over {
            return;
        }
        if let Some(local) = &mut self.local {
            let (lost, asked) = (local.watch(passed), local.asked());
            for stop in [local.wish(), local.wish()].into_iter().flatten() {
                self.peer.outbox.push(&HostMessage::FirstStep { stop });
            }
            if let Some((stop, saves)) = asked {
                self.peer.outbox.push(&HostMessage::LauncherRequests { stop, saves });
            }
            if let Some(lost) = lost
                && self.lost.is_none()
            {
                self.peer.outbox.push(&HostMessage::Lost(lost.clone()));
                self.state.change(|view| view.lost = Some(lost.clone()));
                self.lost = Some(lost);
                (self.gather, self.leave) = (None, None);
            }
        }
        if self.is_open {
            // A leader that was itself suspended has not listened meanwhile.
            self.peer.silent += passed.min(COUNTED);
            let silent = self.peer.silent;
            if silent >= self.timing.host_silence && self.lost.is_none() {
                self.lose_coordinator(LostReason::HostSilent { seconds: silent.as_secs() as u32 });
            }
        }
    }

    fn beat(&mut self, now: Instant) {
        #[cfg(test)]
        if self.is_muted {
            return;
        }
        let beats = self.local.as_mut().map(|local| local.beats(now)).unwrap_or_default();
        if beats.is_empty() {
            self.peer.outbox.push(&HostMessage::Beats(Vec::new()));
        }
        for some in beats.chunks(BEATS) {
            self.peer.outbox.push(&HostMessage::Beats(some.to_vec()));
        }
    }
}

impl Drop for LeaderThread {
    fn drop(&mut self) {
        // The reader ends with the connection.
        self.peer.outbox.close();
    }
}
