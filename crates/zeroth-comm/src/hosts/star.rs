//! The coordinator's thread: lets leaders in, judges their hosts, and tells all of them the same.
//!
//! The first loss that it learns of is the verdict; later ones follow from it, and are ignored.

use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, SyncSender};
use std::time::{Duration, Instant};

use super::chunks::MOST_BYTES;
use super::control_thread::{
    ControlEvent, ControlOrder, HostPeer, LAST, LinkState, TICK, TickClock, WholeReply, next_event,
    read_peer, reason_of, small_thread,
};
use super::frame::FrameError;
use super::handshake;
use super::local_host::LocalHost;
use super::message::{HostMessage, RankBeat, Topic, VERSION};
use super::token::TokenSource;
use crate::error::{LostReason, RankLost};
use crate::join_options::Timing;
use crate::local::{COUNTED, MOST_RANKS, OPEN};
use crate::op_name::LastOp;
use crate::place::{HostRanks, HostTable, Place};

/// Polling interval for connections.
const ACCEPT: Duration = Duration::from_millis(10);
/// Connections that have not proven the token; more are closed at once.
const MOST_UNPROVEN: usize = 256;
/// Strangers that are named.
const MOST_NAMED: usize = 8;

/// The connection of a leader, and its host.
struct LeaderConnection {
    peer: HostPeer,
    /// Set once it has been let in.
    ranks: Option<HostRanks>,
    pid: u32,
    is_open: bool,
    is_leaving: bool,
    /// Its part of the gather that is going on.
    part: Option<Vec<u8>>,
}

impl LeaderConnection {
    fn is_member(&self) -> bool {
        self.ranks.is_some()
    }

    fn has(&self, rank: usize) -> bool {
        self.ranks.as_ref().is_some_and(|host| (host.first..host.first + host.ranks).contains(&rank))
    }
}

/// The coordinator's thread.
pub(super) struct Star {
    place: Place,
    name: String,
    token: TokenSource,
    timing: Timing,
    listener: Option<TcpListener>,
    unproven: Arc<AtomicUsize>,
    hosts: Vec<LeaderConnection>,
    local: Option<Box<LocalHost>>,
    verdict: Option<RankLost>,
    refused: Option<String>,
    /// First step, stop, saves: what all ranks are told.
    told: (u32, bool, u32),
    own_part: Option<(Vec<u8>, WholeReply)>,
    own_leave: Option<SyncSender<()>>,
    /// Whether all hosts have left.
    is_over: bool,
    quits: Option<Instant>,
    is_sent: bool,
    tick: TickClock,
    beat: TickClock,
    events: Receiver<ControlEvent>,
    sender: Sender<ControlEvent>,
    state: Arc<LinkState>,
}

impl Star {
    pub(super) fn new(
        place: Place,
        name: String,
        token: TokenSource,
        timing: Timing,
        listener: TcpListener,
        events: (Sender<ControlEvent>, Receiver<ControlEvent>),
        state: Arc<LinkState>,
    ) -> Self {
        let mut star = Self {
            place,
            name,
            token,
            timing,
            listener: Some(listener),
            unproven: Arc::default(),
            hosts: Vec::new(),
            local: None,
            verdict: None,
            refused: None,
            told: (OPEN, false, 0),
            own_part: None,
            own_leave: None,
            is_over: false,
            quits: None,
            is_sent: true,
            tick: TickClock::start(),
            beat: TickClock::start(),
            events: events.1,
            sender: events.0,
            state,
        };
        star.publish_members();
        star
    }

    /// Runs until it is told to quit.
    pub(super) fn run(mut self) {
        loop {
            let most = if self.listener.is_some() { ACCEPT } else { TICK };
            match next_event(&self.events, !self.is_sent, most) {
                Ok(Some(event)) => {
                    self.handle(event);
                    while let Ok(event) = self.events.try_recv() {
                        self.handle(event);
                    }
                }
                Ok(None) => {}
                Err(_) => return,
            }
            self.accept();
            let now = Instant::now();
            if let Some(passed) = self.tick.due(now, TICK) {
                self.look(passed);
            }
            if self.beat.due(now, self.timing.heartbeat).is_some() {
                if let Some(local) = &mut self.local {
                    let beats = local.beats(now);
                    self.keep(beats, None);
                }
                self.send_all(&HostMessage::Beat { last: self.last_op_of(0) });
            }
            self.is_sent = self
                .hosts
                .iter_mut()
                .filter(|host| host.is_open)
                .fold(true, |all, host| host.peer.outbox.flush() & all);
            if self.quits.is_some_and(|since| self.is_sent || since.elapsed() >= LAST) {
                return;
            }
        }
    }

    /// Takes connections in, each with a thread that asks it to prove the token.
    fn accept(&mut self) {
        let Some(listener) = &self.listener else { return };
        for _ in 0..MOST_UNPROVEN {
            let Ok((stream, from)) = listener.accept() else { return };
            if self.unproven.load(Ordering::Relaxed) >= MOST_UNPROVEN {
                continue;
            }
            self.unproven.fetch_add(1, Ordering::Relaxed);
            let (unproven, sender, token) =
                (Arc::clone(&self.unproven), self.sender.clone(), self.token.clone());
            let prove = move || {
                let proven = stream.set_nonblocking(false).map_err(Into::into).and_then(|()| {
                    let token = token.load().map_err(|error| std::io::Error::other(error.to_string()))?;
                    handshake::accept(&stream, token)
                });
                unproven.fetch_sub(1, Ordering::Relaxed);
                let event = match proven {
                    Ok((sealer, opener)) => ControlEvent::Proven { stream, sealer, opener },
                    Err(error) => ControlEvent::Stranger(format!("{from}: {error}")),
                };
                // Without a coordinator nobody asks for it any more.
                let _ = sender.send(event);
            };
            if small_thread("control handshake".to_owned(), prove).is_err() {
                self.unproven.fetch_sub(1, Ordering::Relaxed);
            }
        }
    }

    fn handle(&mut self, event: ControlEvent) {
        match event {
            ControlEvent::Stranger(who) => self.name_stranger(who),
            ControlEvent::Proven { stream, sealer, opener } => {
                // Small messages at once: they are verdicts.
                let reader = stream.set_nodelay(true).and_then(|()| stream.try_clone());
                let number = self.hosts.len();
                let read = reader.and_then(|reader| read_peer(number, reader, opener, self.sender.clone()));
                if let Err(error) = read {
                    return self.name_stranger(format!("a leader could not be read: {error}"));
                }
                self.hosts.push(LeaderConnection {
                    peer: HostPeer::new(stream, sealer),
                    ranks: None,
                    pid: 0,
                    is_open: true,
                    is_leaving: false,
                    part: None,
                });
            }
            ControlEvent::Message { peer, message } => {
                self.hosts[peer].peer.silent = Duration::ZERO;
                if self.hosts[peer].is_open {
                    self.hear(peer, message);
                }
            }
            ControlEvent::Closed { peer, why } => self.closed(peer, &why),
            ControlEvent::Order(order) => self.obey(order),
        }
    }

    fn obey(&mut self, order: ControlOrder) {
        match order {
            ControlOrder::Attach(local) => {
                self.local = Some(local);
                if let (Some(lost), Some(local)) = (&self.verdict, &mut self.local) {
                    local.end(lost);
                }
            }
            ControlOrder::Begin(bytes) => {
                for host in self.hosts.iter_mut().filter(|host| host.is_open && host.is_member()) {
                    host.peer.outbox.push_long(Topic::Begin, Arc::clone(&bytes));
                }
            }
            ControlOrder::Refuse(reason) => {
                self.send_all(&HostMessage::Refused(reason.clone()));
                self.refused = Some(reason);
            }
            ControlOrder::Gather(part, reply) => {
                self.own_part = Some((part, reply));
                self.gather();
            }
            ControlOrder::Leave(reply) => {
                self.own_leave = Some(reply);
                self.leave();
            }
            ControlOrder::Quit => {
                // What a rank of this host has just reported is still passed on.
                self.look(Duration::ZERO);
                if !self.is_over && self.verdict.is_none() && self.refused.is_none() && self.local.is_some() {
                    let (host, pid, reason) = (self.name.clone(), std::process::id(), LostReason::Left);
                    let last = self.last_op_of(0);
                    self.lose(RankLost { rank: 0, host, pid, reason, last, by: None, waiting_in: None });
                }
                self.quits = Some(Instant::now());
            }
            #[cfg(test)]
            ControlOrder::Break | ControlOrder::Mute => unreachable!("tests break leaders"),
        }
    }

    fn hear(&mut self, peer: usize, message: HostMessage) {
        let is_member = self.hosts[peer].is_member();
        match message {
            HostMessage::Hello { version, world, first, ranks, pid, name } if !is_member => {
                let ranks = HostRanks { name, first: first as usize, ranks: ranks as usize };
                self.let_in(peer, version, world as usize, ranks, pid);
            }
            _ if !is_member => self.not_of_this_job(peer),
            HostMessage::Beats(beats) => {
                if beats.iter().all(|beat| self.hosts[peer].has(beat.rank as usize)) {
                    self.keep(beats, Some(peer));
                } else {
                    self.not_of_this_job(peer);
                }
            }
            HostMessage::Lost(lost) if self.hosts[peer].has(lost.rank) => self.lose(lost),
            HostMessage::FirstStep { stop } => self.decide(stop),
            HostMessage::LauncherRequests { stop, saves } => self.asked(stop, saves),
            HostMessage::Leaving => {
                self.hosts[peer].is_leaving = true;
                self.leave();
            }
            HostMessage::Gone => {
                let reason = LostReason::Left;
                self.lose_host(peer, reason);
            }
            HostMessage::Chunk { topic: Topic::Part, total, bytes } => {
                match self.hosts[peer].peer.take(Topic::Part, total, &bytes) {
                    Ok(None) => {}
                    Ok(Some((_, part))) if self.hosts[peer].part.is_none() => {
                        self.hosts[peer].part = Some(part);
                        self.gather();
                    }
                    _ => self.not_of_this_job(peer),
                }
            }
            _ => self.not_of_this_job(peer),
        }
    }

    /// Lets a leader in, or tells it why not.
    fn let_in(&mut self, peer: usize, version: u32, world: usize, ranks: HostRanks, pid: u32) {
        let HostRanks { name, first, ranks: count } = &ranks;
        let (own, end) = (self.place.world, first.saturating_add(*count));
        let other =
            self.hosts.iter().filter_map(|host| host.ranks.as_ref()).chain([&self.own_ranks()]).find_map(
                |host| (host.first < end && *first < host.first + host.ranks).then(|| host.name.clone()),
            );
        let reason = if version != VERSION {
            Some(format!(
                "host {name} runs another version of zeroth: its control messages are {version}, here {VERSION}"
            ))
        } else if world != own {
            Some(format!("host {name} was started with rank {first} of {world}, and rank 0 as one of {own}"))
        } else if !(1..=MOST_RANKS).contains(count) || end > own {
            Some(format!(
                "host {name} says that it has {count} ranks from rank {first} on; a host has 1 to {MOST_RANKS} of the {own}"
            ))
        } else {
            other.map(|other| {
                format!(
                    "host {name} has ranks {first} to {}, of which host {other} has some: ranks must be numbered host by host, \
                     and each started once",
                    end - 1
                )
            })
        };
        let reason = reason.or_else(|| self.refused.clone());
        if let Some(reason) = reason {
            let message = match &self.refused {
                Some(refused) => HostMessage::Refused(refused.clone()),
                None => HostMessage::Rejected(reason.clone()),
            };
            self.hosts[peer].peer.outbox.push(&message);
            // It closes the connection once it has read why.
            return self.name_stranger(reason);
        }
        let welcome = HostMessage::Welcome { pid: std::process::id(), name: self.name.clone() };
        let host = &mut self.hosts[peer];
        host.peer.outbox.push(&welcome);
        (host.ranks, host.pid) = (Some(ranks), pid);
        self.publish_members();
    }

    fn own_ranks(&self) -> HostRanks {
        HostRanks { name: self.name.clone(), first: 0, ranks: self.place.local_world }
    }

    /// Publishes who is there. Once all are, nothing listens any more.
    fn publish_members(&mut self) {
        let members: Vec<HostRanks> =
            self.hosts.iter().filter_map(|host| host.ranks.clone()).chain([self.own_ranks()]).collect();
        let is_there =
            |rank: usize| members.iter().any(|host| (host.first..host.first + host.ranks).contains(&rank));
        let missing: Vec<usize> = (0..self.place.world).filter(|rank| !is_there(*rank)).collect();
        let table = missing.is_empty().then(|| HostTable::new(members));
        if missing.is_empty() {
            self.listener = None;
        }
        let world = self.place.world;
        self.state.change(|view| {
            view.missing = missing;
            view.seen.resize(world, None);
            match table {
                Some(Ok(table)) => view.table = Some(table),
                Some(Err(error)) => view.rejected = Some(error.to_string()),
                None => {}
            }
        });
    }

    fn name_stranger(&self, who: String) {
        self.state.change(|view| {
            if view.strangers.len() < MOST_NAMED {
                view.strangers.push(who);
            }
        });
    }

    /// A peer that knows the token and says what no leader says.
    fn not_of_this_job(&mut self, peer: usize) {
        if self.hosts[peer].is_member() {
            self.lose_host(peer, LostReason::BadFrame);
        } else {
            self.hosts[peer].is_open = false;
            self.hosts[peer].peer.outbox.close();
        }
    }

    fn closed(&mut self, peer: usize, why: &FrameError) {
        if !std::mem::replace(&mut self.hosts[peer].is_open, false) {
            return;
        }
        let reason = reason_of(why, self.hosts[peer].peer.silent);
        if self.hosts[peer].is_member() && !self.is_over && self.refused.is_none() {
            self.lose_host(peer, reason);
        }
    }

    /// The rank that leads a host is lost, and with it the host.
    fn lose_host(&mut self, peer: usize, reason: LostReason) {
        let host = &mut self.hosts[peer];
        host.is_open = false;
        // What is known is sent first: a leader that leaves may still read why.
        host.peer.outbox.flush();
        host.peer.outbox.close();
        let (Some(ranks), pid) = (host.ranks.clone(), host.pid) else { return };
        let last = self.last_op_of(ranks.first);
        self.lose(RankLost {
            rank: ranks.first,
            host: ranks.name,
            pid,
            reason,
            last,
            by: None,
            waiting_in: None,
        });
    }

    fn last_op_of(&self, rank: usize) -> Option<LastOp> {
        self.state.lock().seen.get(rank).cloned().flatten().and_then(|seen| seen.last)
    }

    /// The verdict, if it is the first.
    fn lose(&mut self, mut lost: RankLost) {
        if self.verdict.is_some() || self.is_over {
            return;
        }
        // Names as in the table: two hosts may call themselves the same.
        if let Some(table) = &self.state.lock().table
            && let Some(host) = table.host_of(lost.rank)
        {
            lost.host.clone_from(&table.hosts()[host].name);
        }
        if let Some(local) = &mut self.local {
            local.end(&lost);
        }
        self.send_all(&HostMessage::Lost(lost.clone()));
        self.state.change(|view| view.lost = Some(lost.clone()));
        self.verdict = Some(lost);
        // Whoever waits for an answer finds the verdict instead.
        (self.own_part, self.own_leave) = (None, None);
    }

    fn send_all(&mut self, message: &HostMessage) {
        for host in self.hosts.iter_mut().filter(|host| host.is_open && host.is_member()) {
            host.peer.outbox.push(message);
        }
    }

    /// Looks at the ranks of this host, and at the silence of the others.
    fn look(&mut self, passed: Duration) {
        if self.is_over {
            return;
        }
        if let Some(local) = &mut self.local {
            let (lost, asked) = (local.watch(passed), local.asked());
            let wishes = [local.wish(), local.wish()];
            if let Some(lost) = lost {
                self.lose(lost);
            }
            wishes.into_iter().flatten().for_each(|stop| self.decide(stop));
            if let Some((stop, saves)) = asked {
                self.asked(stop, saves);
            }
        }
        let limit = self.timing.host_silence;
        for peer in 0..self.hosts.len() {
            let host = &mut self.hosts[peer];
            if host.is_open && host.is_member() {
                // A coordinator that was itself suspended has not listened meanwhile.
                host.peer.silent += passed.min(COUNTED);
                let silent = host.peer.silent;
                if silent >= limit && self.verdict.is_none() {
                    self.lose_host(peer, LostReason::HostSilent { seconds: silent.as_secs() as u32 });
                }
            }
        }
    }

    /// Keeps what a host says of its ranks, under the host's name.
    fn keep(&mut self, beats: Vec<RankBeat>, peer: Option<usize>) {
        let own = || self.name.clone();
        let name =
            peer.and_then(|peer| self.hosts[peer].ranks.as_ref()).map_or_else(own, |host| host.name.clone());
        let mut view = self.state.lock();
        let name = view.table.as_ref().zip(beats.first()).map_or(name.clone(), |(table, beat)| {
            table.host_of(beat.rank as usize).map_or(name, |host| table.hosts()[host].name.clone())
        });
        for RankBeat { rank, mut seen } in beats {
            seen.host = Some(name.clone());
            if let Some(slot) = view.seen.get_mut(rank as usize) {
                *slot = Some(seen);
            }
        }
    }

    /// Decides on the first step: the first wish that comes.
    fn decide(&mut self, stop: bool) {
        if let Some(local) = &self.local {
            self.told.0 = local.decide(stop);
            self.tell();
        }
    }

    fn asked(&mut self, stop: bool, saves: u32) {
        self.told.1 |= stop;
        self.told.2 = self.told.2.wrapping_add(saves);
        self.tell();
    }

    fn tell(&mut self) {
        let (first_step, stop, saves) = self.told;
        if let Some(local) = &self.local {
            local.apply(first_step, stop, saves);
        }
        self.send_all(&HostMessage::State { first_step, stop, saves });
    }

    /// Sends the parts of all hosts to all, once they are there.
    fn gather(&mut self) {
        let members = || self.hosts.iter().filter(|host| host.is_member());
        if self.own_part.is_none() || !members().all(|host| host.part.is_some()) {
            return;
        }
        let Some((own, reply)) = self.own_part.take() else { return };
        let mut parts: Vec<(usize, Vec<u8>)> = vec![(0, own)];
        for host in &mut self.hosts {
            if let (Some(ranks), Some(part)) = (&host.ranks, host.part.take()) {
                parts.push((ranks.first, part));
            }
        }
        parts.sort_by_key(|(first, _)| *first);
        let bytes: usize = parts.iter().map(|(_, part)| part.len()).sum();
        if bytes > MOST_BYTES {
            let largest = parts.iter().max_by_key(|(_, part)| part.len()).map_or(0, |(first, _)| *first);
            let pid = if largest == 0 { std::process::id() } else { 0 };
            let host = self.name.clone();
            let reason = LostReason::BadFrame;
            return self.lose(RankLost {
                rank: largest,
                host,
                pid,
                reason,
                last: None,
                by: None,
                waiting_in: None,
            });
        }
        let whole: Arc<[u8]> = parts.into_iter().flat_map(|(_, part)| part).collect();
        for host in self.hosts.iter_mut().filter(|host| host.is_open && host.ranks.is_some()) {
            host.peer.outbox.push_long(Topic::Whole, Arc::clone(&whole));
        }
        // A rank that does not wait any more has failed, and says so by itself.
        let _ = reply.send(whole);
    }

    /// Lets all hosts leave, once all want to.
    fn leave(&mut self) {
        let all = self.hosts.iter().filter(|host| host.is_member()).all(|host| host.is_leaving);
        if !all || self.verdict.is_some() {
            return;
        }
        if let Some(reply) = self.own_leave.take() {
            self.send_all(&HostMessage::AllLeft);
            self.is_over = true;
            let _ = reply.send(());
        }
    }
}

impl Drop for Star {
    fn drop(&mut self) {
        // Readers end with their connections.
        for host in &self.hosts {
            host.peer.outbox.close();
        }
    }
}
