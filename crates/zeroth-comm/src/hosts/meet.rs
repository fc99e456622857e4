//! How the ranks of all hosts meet: leaders at the coordinator, the ranks of each host at its leader.

use std::fmt;
use std::net::SocketAddr;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use super::control_thread::{ControlOrder, ControlThread, LAST, LinkState, TICK, small_thread};
use super::leader::{self, Admitted, LeaderThread, NotAdmitted};
use super::link::{HostLink, JoinedHost};
use super::local_host::LocalHost;
use super::settings::JobSettings;
use super::star::Star;
use super::{HostOptions, TokenError, TokenSource};
use crate::error::{JoinError, LostReason, RankLost};
use crate::join_options::{JoinOptions, Timing};
use crate::local::{LocalJob, SharedSegment, join_with_segment};
use crate::place::{HostTable, Place, own_name};
use crate::rendezvous::{self, Admission, RendezvousError, WaitReporter, request_join_on_host};

/// Polling interval for rank 0.
const AGAIN: Duration = Duration::from_millis(100);
/// How long a token that rank 0 does not know is tried again: it may be about to replace an earlier job's.
const OTHER_TOKEN: Duration = Duration::from_secs(10);

/// Rank 0 of a job on any number of hosts. Dropping it before [`Self::begin`] ends the wait of all others.
pub struct JobCoordinator {
    place: Place,
    options: HostOptions,
    name: String,
    local: rendezvous::Coordinator,
    star: Option<ControlThread>,
    address: Option<SocketAddr>,
    opened: Instant,
}

impl JobCoordinator {
    /// Opens the socket for the ranks of this host and, if there are other hosts, listens for their leaders. Call it first:
    /// other ranks wait for it, and notice from then on when this process ends.
    pub fn open(job: &str, place: Place, options: &HostOptions) -> Result<Self, RendezvousError> {
        place.check()?;
        let local = open_on_host(job, place, options)?;
        let name = options.name.clone().unwrap_or_else(own_name);
        let (mut star, mut address) = (None, None);
        if !place.is_one_host() {
            let (thread, at) = listen(place, &name, options)?;
            (star, address) = (Some(thread), Some(at));
        }
        Ok(Self { place, options: options.clone(), name, local, star, address, opened: Instant::now() })
    }

    #[cfg(test)]
    pub(super) fn thread(&self) -> &ControlThread {
        self.star.as_ref().expect("there are several hosts")
    }

    /// Where it listens; `None` on one host.
    pub fn address(&self) -> Option<SocketAddr> {
        self.address
    }

    /// Creates the job, sends `message` to the ranks of all hosts, and joins it as rank 0 once those of this host have it.
    /// `region` is as in [`LocalJob::create`].
    pub fn begin(
        mut self,
        region: usize,
        message: &[u8],
        options: &JoinOptions,
    ) -> Result<JoinedHost, RendezvousError> {
        let job = LocalJob::create(self.place.local_world, region)?;
        let Some(star) = &self.star else {
            self.local.admit(&job, message)?;
            let table = HostTable::in_order([(self.name, self.place.local_world)])?;
            return Ok(joined(self.place, table, &job, None, options, self.options.timing)?);
        };
        let table = self.all_hosts(star)?;
        let settings = JobSettings::to_bytes(region as u64, &table, message);
        if settings.len() > super::chunks::MOST_BYTES {
            let most = super::chunks::MOST_BYTES - (settings.len() - message.len());
            return Err(RendezvousError::MessageSize { bytes: message.len(), most });
        }
        attach(star, &job, self.place, &table, self.options.timing);
        star.order(ControlOrder::Begin(settings.as_slice().into()));
        self.local.admit(&job, &settings).map_err(|error| lost_instead(star, &job, self.place, error))?;
        Ok(joined(self.place, table, &job, self.star.take(), options, self.options.timing)?)
    }

    /// Cancels the job with a reason. Ranks that connect within a few seconds still receive it.
    pub fn refuse(self, reason: &str) {
        if let Some(star) = &self.star {
            star.order(ControlOrder::Refuse(reason.to_owned()));
        }
        let began = Instant::now();
        self.local.refuse(reason);
        if let Some(star) = &self.star {
            let mut view = star.state.lock();
            while !view.missing.is_empty() && began.elapsed() < LAST {
                view = star.state.wait(view, TICK);
            }
        }
    }

    /// Waits until the leaders of all hosts have come.
    fn all_hosts(&self, star: &ControlThread) -> Result<HostTable, RendezvousError> {
        let policy = &self.options.policy;
        let mut reporter = WaitReporter::new(policy);
        let mut view = star.state.lock();
        loop {
            if let Some(lost) = &view.lost {
                return Err(RendezvousError::Lost(Box::new(lost.clone())));
            }
            if let Some(reason) = &view.rejected {
                return Err(RendezvousError::Hosts { reason: reason.clone() });
            }
            if let Some(table) = &view.table {
                return Ok(table.clone());
            }
            let waited = self.opened.elapsed();
            if waited >= policy.hosts {
                let mut refused = view.strangers.clone();
                let missing = view.missing.clone();
                refused.extend(self.options.expected.as_ref().and_then(|hosts| names(hosts, &missing)));
                return Err(RendezvousError::Missing { missing, waited, refused });
            }
            let missing = view.missing.clone();
            view = star.state.wait(view, TICK);
            reporter.report(waited, self.place.rank, missing);
        }
    }
}

/// The hosts of missing ranks.
fn names(hosts: &HostTable, missing: &[usize]) -> Option<String> {
    let is_missing = |first: usize| missing.binary_search(&first).is_ok();
    let names: Vec<&str> =
        hosts.hosts().iter().filter(|host| is_missing(host.first)).map(|host| host.name.as_str()).collect();
    (!names.is_empty()).then(|| format!("nothing came from host {}", names.join(", ")))
}

/// Starts the coordinator's thread.
fn listen(
    place: Place,
    name: &str,
    options: &HostOptions,
) -> Result<(ControlThread, SocketAddr), RendezvousError> {
    let address = options.address.as_ref().ok_or(RendezvousError::NoAddress)?;
    let token = token(options)?;
    token.load()?;
    let failed = |source| RendezvousError::Listen { address: address.to_string(), source };
    let listener = address.listen().map_err(failed)?;
    let at = listener.local_addr().map_err(failed)?;
    listener.set_nonblocking(true).map_err(failed)?;
    let state = Arc::new(LinkState::default());
    let (sender, receiver) = mpsc::channel();
    let events = (sender.clone(), receiver);
    let star = Star::new(place, name.to_owned(), token, options.timing, listener, events, Arc::clone(&state));
    let thread = small_thread("coordinator".to_owned(), move || star.run()).map_err(failed)?;
    Ok((ControlThread { orders: sender, state, thread: Some(thread) }, at))
}

fn token(options: &HostOptions) -> Result<TokenSource, RendezvousError> {
    Ok(options.token.clone().ok_or(TokenError::None)?)
}

/// Gives the ranks of this host to the thread that holds its control connection.
fn attach(thread: &ControlThread, job: &LocalJob, place: Place, table: &HostTable, timing: Timing) {
    let segment = job.segment();
    let name = table.hosts().get(place.host).map_or("", |host| host.name.as_str());
    segment.header().hosts.set(place.first(), place.world, name);
    let local = LocalHost::new(Arc::clone(segment), of_several_hosts(timing));
    thread.order(ControlOrder::Attach(Box::new(local)));
}

/// On several hosts a silent rank is lost as soon as a silent host.
fn of_several_hosts(timing: Timing) -> Timing {
    Timing { lost: timing.lost.min(timing.host_silence), ..timing }
}

fn joined(
    place: Place,
    hosts: HostTable,
    job: &LocalJob,
    thread: Option<ControlThread>,
    options: &JoinOptions,
    timing: Timing,
) -> Result<JoinedHost, JoinError> {
    let options = on_hosts(place, options, timing);
    let (group, segment) = join_with_segment(job.fd(), job.token(), place.local_rank, &options)?;
    Ok(JoinedHost { group, link: HostLink::new(place, hosts, segment, options.timing, thread) })
}

fn on_hosts(place: Place, options: &JoinOptions, timing: Timing) -> JoinOptions {
    if place.is_one_host() {
        return options.clone();
    }
    let own = Timing { host_silence: timing.host_silence, ..options.timing };
    options.clone().timing(of_several_hosts(own))
}

/// Opens the socket for the ranks of this host. With other hosts that wait, a rank is missed as soon as a host.
fn open_on_host(
    job: &str,
    place: Place,
    options: &HostOptions,
) -> Result<rendezvous::Coordinator, RendezvousError> {
    let policy = options.policy.clone();
    let policy = if place.is_one_host() { policy } else { policy.peers_as_hosts() };
    rendezvous::Coordinator::open_on_host(job, place, policy)
}

/// The verdict, where it explains an error. Other hosts are told which rank of this one did not come.
fn lost_instead(
    thread: &ControlThread,
    job: &LocalJob,
    place: Place,
    error: RendezvousError,
) -> RendezvousError {
    if let RendezvousError::Missing { missing, waited, .. } = &error
        && let Some(rank) = missing.first()
    {
        let seconds = waited.as_secs() as u32;
        job.end(rank - place.first(), LostReason::NeverJoined { seconds });
        return error;
    }
    match &thread.state.lock().lost {
        Some(lost) => RendezvousError::Lost(Box::new(lost.clone())),
        None => error,
    }
}

/// The coordinator's answer to a rank: the job, and a message.
pub struct HostAdmission {
    place: Place,
    hosts: HostTable,
    message: Vec<u8>,
    timing: Timing,
    entry: Entry,
}

/// How a rank enters the segment of its host.
enum Entry {
    /// The leader has made it.
    Leader(LocalJob, ControlThread),
    Rank(Admission),
}

impl HostAdmission {
    /// Rank 0's message to all ranks.
    pub fn message(&self) -> &[u8] {
        &self.message
    }

    /// All hosts.
    pub fn hosts(&self) -> &HostTable {
        &self.hosts
    }

    /// Joins the job.
    pub fn join(self, options: &JoinOptions) -> Result<JoinedHost, JoinError> {
        match self.entry {
            Entry::Leader(job, thread) => {
                joined(self.place, self.hosts, &job, Some(thread), options, self.timing)
            }
            Entry::Rank(admission) => {
                let options = on_hosts(self.place, options, self.timing);
                let (group, segment): (_, Arc<SharedSegment>) = admission.join_with_segment(&options)?;
                let link = HostLink::new(self.place, self.hosts, segment, options.timing, None);
                Ok(JoinedHost { group, link })
            }
        }
    }
}

impl fmt::Debug for HostAdmission {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostAdmission").field("place", &self.place).finish_non_exhaustive()
    }
}

/// Requests to join `job` as the rank of `place`, and waits for rank 0's answer: a leader at the coordinator, any other rank at
/// the leader of its host.
pub fn request_join(
    job: &str,
    place: Place,
    options: &HostOptions,
) -> Result<HostAdmission, RendezvousError> {
    place.check()?;
    if place.is_leader() && place.rank != 0 {
        return lead(job, place, options);
    }
    let admission = request_join_on_host(job, place, &options.policy)?;
    let (place, hosts, message) = if place.is_one_host() {
        let name = options.name.clone().unwrap_or_else(own_name);
        (place, HostTable::in_order([(name, place.local_world)])?, admission.message().to_vec())
    } else {
        let JobSettings { hosts, message, .. } =
            JobSettings::of_bytes(admission.message()).ok_or_else(|| not_settings(place))?;
        (placed(&hosts, place)?, hosts, message)
    };
    Ok(HostAdmission { place, hosts, message, timing: options.timing, entry: Entry::Rank(admission) })
}

fn not_settings(place: Place) -> RendezvousError {
    let why = "its settings are not those of a job on several hosts".to_owned();
    RendezvousError::Malformed { name: format!("of the host with rank {}", place.first()), why }
}

/// The place that all hosts agree on.
fn placed(hosts: &HostTable, place: Place) -> Result<Place, RendezvousError> {
    let found = hosts.place(place.rank).filter(|found| {
        (found.world, found.local_rank, found.local_world)
            == (place.world, place.local_rank, place.local_world)
    });
    found.ok_or_else(|| RendezvousError::Hosts {
        reason: format!("rank {} is not where it says, among {hosts}", place.rank),
    })
}

/// The leader's part: it meets the coordinator, waits for the job to begin, and serves the ranks of its host.
fn lead(job: &str, place: Place, options: &HostOptions) -> Result<HostAdmission, RendezvousError> {
    let mut local = open_on_host(job, place, options)?;
    let name = options.name.clone().unwrap_or_else(own_name);
    let admitted = match admitted(place, &name, options) {
        Ok(admitted) => admitted,
        Err(RendezvousError::Refused { reason }) => {
            local.refuse(&reason);
            return Err(RendezvousError::Refused { reason });
        }
        Err(error) => return Err(error),
    };
    let failed = |source| RendezvousError::System { what: "start the control thread", source };
    let state = Arc::new(LinkState::default());
    let (sender, receiver) = mpsc::channel();
    let events = (sender.clone(), receiver);
    let leader =
        LeaderThread::new(admitted, place, options.timing, events, Arc::clone(&state)).map_err(failed)?;
    let thread = small_thread("control".to_owned(), move || leader.run()).map_err(failed)?;
    let thread = ControlThread { orders: sender, state, thread: Some(thread) };
    let settings = match begun(&thread, place, options) {
        Ok(settings) => settings,
        Err(RendezvousError::Refused { reason }) => {
            local.refuse(&reason);
            return Err(RendezvousError::Refused { reason });
        }
        Err(error) => return Err(error),
    };
    let JobSettings { region, hosts, message } =
        JobSettings::of_bytes(&settings).ok_or_else(|| not_settings(place))?;
    let place = placed(&hosts, place)?;
    let job = LocalJob::create(place.local_world, usize::try_from(region).unwrap_or(usize::MAX))?;
    attach(&thread, &job, place, &hosts, options.timing);
    local.admit(&job, &settings).map_err(|error| lost_instead(&thread, &job, place, error))?;
    Ok(HostAdmission { place, hosts, message, timing: options.timing, entry: Entry::Leader(job, thread) })
}

/// Tries to be let in until rank 0 does, or says no.
fn admitted(place: Place, name: &str, options: &HostOptions) -> Result<Admitted, RendezvousError> {
    let address = options.address.as_ref().ok_or(RendezvousError::NoAddress)?;
    let token = token(options)?;
    let rank = place.rank;
    let (began, mut reporter) = (Instant::now(), WaitReporter::new(&options.policy));
    let mut other_token: Option<Instant> = None;
    loop {
        let seen = match leader::attempt(address, &token, place, name) {
            Ok(admitted) => return Ok(admitted),
            Err(NotAdmitted::Rejected(reason)) => return Err(RendezvousError::Rejected { rank, reason }),
            Err(NotAdmitted::Refused(reason)) => return Err(RendezvousError::Refused { reason }),
            Err(NotAdmitted::Yet(seen)) => seen,
        };
        let waited = began.elapsed();
        let is_other =
            matches!(address.port, super::PortChoice::Given(_)) && seen.contains(leader::OTHER_TOKEN);
        other_token = other_token.filter(|_| is_other).or(is_other.then(Instant::now));
        let is_hopeless = other_token.is_some_and(|since| since.elapsed() >= OTHER_TOKEN);
        if waited >= options.policy.hosts || is_hopeless {
            // A file that cannot be used says why by itself.
            token.load()?;
            let address = address.to_string();
            return Err(RendezvousError::NoCoordinator { rank, waited, address, seen });
        }
        std::thread::sleep(AGAIN);
        reporter.report(waited, rank, vec![0]);
    }
}

/// Waits for the settings of the job.
fn begun(thread: &ControlThread, place: Place, options: &HostOptions) -> Result<Vec<u8>, RendezvousError> {
    let (began, mut reporter) = (Instant::now(), WaitReporter::new(&options.policy));
    let mut view = thread.state.lock();
    loop {
        if let Some(reason) = &view.refused {
            return Err(RendezvousError::Refused { reason: reason.clone() });
        }
        if let Some(lost) = &view.lost {
            return Err(RendezvousError::Lost(Box::<RankLost>::new(lost.clone())));
        }
        if let Some(begun) = view.begun.take() {
            return Ok(begun);
        }
        let waited = began.elapsed();
        if waited >= options.policy.rank0 {
            return Err(RendezvousError::NoBegin { rank: place.rank, waited });
        }
        view = thread.state.wait(view, TICK);
        reporter.report(waited, place.rank, vec![0]);
    }
}
