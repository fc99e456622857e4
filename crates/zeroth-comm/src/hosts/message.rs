//! What leaders and the coordinator say to each other.

use super::codec::{MessageBytes, MessageParts};
use crate::comm::RankObservation;
use crate::error::{LostReason, RankLost};
use crate::local::MOST_RANKS;
use crate::op_name::LastOp;
use crate::place::{MOST_HOSTS, MOST_NAME, check_name};
use crate::process::ProcessState;
use crate::progress::RankPhase;

/// Changes with the messages, so that hosts of different versions do not misread each other.
pub(super) const VERSION: u32 = 1;
/// The most bytes of a reason.
const MOST_REASON: usize = 4096;
/// The most bytes of an operation's name.
const MOST_OP: usize = 40;
/// Heartbeats in one message.
pub(super) const BEATS: usize = 256;
/// Bytes of a chunk.
pub(super) const CHUNK: usize = 60 << 10;

/// A heartbeat of one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct RankBeat {
    pub(super) rank: u32,
    pub(super) seen: RankObservation,
}

/// What a series of chunks carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Topic {
    /// Down: the job begins.
    Begin = 1,
    /// Up: a host's part of a gather.
    Part = 2,
    /// Down: the parts of all hosts.
    Whole = 3,
}

/// A message of either direction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum HostMessage {
    /// Up, first: which ranks this host has.
    Hello { version: u32, world: u32, first: u32, ranks: u32, pid: u32, name: String },
    /// Up: heartbeats of the host's ranks; of none before they have joined.
    Beats(Vec<RankBeat>),
    /// Up: a rank of this host is lost. Down: the verdict.
    Lost(RankLost),
    /// Up: a rank asks to begin the first step, or to stop before it.
    FirstStep { stop: bool },
    /// Up: the launcher of this host asks to stop, or for more saves.
    LauncherRequests { stop: bool, saves: u32 },
    /// Up: this host is done, and waits for the others.
    Leaving,
    /// Up: this host leaves, done or not.
    Gone,
    /// Down, first: who the coordinator is.
    Welcome { pid: u32, name: String },
    /// Down: this host is not let in.
    Rejected(String),
    /// Down: the job is cancelled.
    Refused(String),
    /// Down: the coordinator lives; where rank 0 is.
    Beat { last: Option<LastOp> },
    /// Down: the decision on the first step, and what all ranks are asked for.
    State { first_step: u32, stop: bool, saves: u32 },
    /// Down: all hosts are done.
    AllLeft,
    /// Both: a piece of something longer.
    Chunk { topic: Topic, total: u32, bytes: Vec<u8> },
}

impl HostMessage {
    pub(super) fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = MessageBytes::default();
        match self {
            Self::Hello { version, world, first, ranks, pid, name } => {
                bytes.byte(1).number(*version).number(*world).number(*first).number(*ranks).number(*pid);
                bytes.text(name, MOST_NAME);
            }
            Self::Beats(beats) => {
                bytes.byte(2).number(beats.len() as u32);
                for beat in beats {
                    write_beat(&mut bytes, beat);
                }
            }
            Self::Lost(lost) => write_lost(bytes.byte(3), lost),
            Self::FirstStep { stop } => {
                bytes.byte(4).flag(*stop);
            }
            Self::LauncherRequests { stop, saves } => {
                bytes.byte(5).flag(*stop).number(*saves);
            }
            Self::Leaving => {
                bytes.byte(6);
            }
            Self::Gone => {
                bytes.byte(7);
            }
            Self::Welcome { pid, name } => {
                bytes.byte(8).number(*pid).text(name, MOST_NAME);
            }
            Self::Rejected(reason) => {
                bytes.byte(9).text(reason, MOST_REASON);
            }
            Self::Refused(reason) => {
                bytes.byte(10).text(reason, MOST_REASON);
            }
            Self::Beat { last } => write_last(bytes.byte(11), last.as_ref()),
            Self::State { first_step, stop, saves } => {
                bytes.byte(12).number(*first_step).flag(*stop).number(*saves);
            }
            Self::AllLeft => {
                bytes.byte(13);
            }
            Self::Chunk { topic, total, bytes: piece } => {
                bytes.byte(14).byte(*topic as u8).number(*total).rest(piece);
            }
        }
        bytes.0
    }

    /// The message of some bytes; `None` where there is none.
    pub(super) fn of_bytes(bytes: &[u8]) -> Option<Self> {
        let parts = &mut MessageParts(bytes);
        let message = match parts.byte()? {
            1 => Self::Hello {
                version: parts.number()?,
                world: parts.number()?,
                first: parts.number()?,
                ranks: parts.number()?,
                pid: parts.number()?,
                name: parts.text(MOST_NAME).filter(|name| check_name(name).is_ok())?,
            },
            2 => {
                let count = parts.number().filter(|count| *count as usize <= BEATS)?;
                Self::Beats((0..count).map(|_| read_beat(parts)).collect::<Option<_>>()?)
            }
            3 => Self::Lost(read_lost(parts)?),
            4 => Self::FirstStep { stop: parts.flag()? },
            5 => Self::LauncherRequests { stop: parts.flag()?, saves: parts.number()? },
            6 => Self::Leaving,
            7 => Self::Gone,
            8 => Self::Welcome {
                pid: parts.number()?,
                name: parts.text(MOST_NAME).filter(|name| check_name(name).is_ok())?,
            },
            9 => Self::Rejected(parts.text(MOST_REASON)?),
            10 => Self::Refused(parts.text(MOST_REASON)?),
            11 => {
                let mut last = None;
                read_last(parts, &mut last)?;
                Self::Beat { last }
            }
            12 => Self::State {
                first_step: parts.number().filter(|word| *word <= 2)?,
                stop: parts.flag()?,
                saves: parts.number()?,
            },
            13 => Self::AllLeft,
            14 => {
                let topic = match parts.byte()? {
                    1 => Topic::Begin,
                    2 => Topic::Part,
                    3 => Topic::Whole,
                    _ => return None,
                };
                Self::Chunk { topic, total: parts.number()?, bytes: parts.rest().to_vec() }
            }
            _ => return None,
        };
        parts.end()?;
        Some(message)
    }
}

/// Ranks of a job; none has more.
const MOST_WORLD: usize = MOST_RANKS * MOST_HOSTS;

fn read_rank(parts: &mut MessageParts<'_>) -> Option<u32> {
    parts.number().filter(|rank| (*rank as usize) < MOST_WORLD)
}

fn write_lost(bytes: &mut MessageBytes, lost: &RankLost) {
    let (kind, detail) = lost.reason.to_numbers();
    bytes.number(lost.rank as u32).number(lost.pid).byte(kind).number(detail).text(&lost.host, MOST_NAME);
    write_last(bytes, lost.last.as_ref());
}

fn read_lost(parts: &mut MessageParts<'_>) -> Option<RankLost> {
    let (rank, pid) = (read_rank(parts)? as usize, parts.number()?);
    let reason = LostReason::of_numbers(parts.byte()?, parts.number()?)?;
    let host = parts.text(MOST_NAME).filter(|name| check_name(name).is_ok())?;
    let mut last = None;
    read_last(parts, &mut last)?;
    Some(RankLost { rank, host, pid, reason, last, by: None, waiting_in: None })
}

fn write_last(bytes: &mut MessageBytes, last: Option<&LastOp>) {
    bytes.flag(last.is_some());
    if let Some(last) = last {
        bytes.flag(last.inside).long(last.step).number(last.index).text(&last.name, MOST_OP);
    }
}

/// Reads an operation into `last`, if there is one; `None` where there is neither.
fn read_last(parts: &mut MessageParts<'_>, last: &mut Option<LastOp>) -> Option<()> {
    if parts.flag()? {
        let (inside, step, index) = (parts.flag()?, parts.long()?, parts.number()?);
        *last = Some(LastOp { step, name: parts.text(MOST_OP)?, index, inside });
    }
    Some(())
}

const STATES: [ProcessState; 4] =
    [ProcessState::Absent, ProcessState::Running, ProcessState::Stopped, ProcessState::Ended];

fn write_beat(bytes: &mut MessageBytes, beat: &RankBeat) {
    let RankBeat { rank, seen } = beat;
    let state = STATES.iter().position(|state| *state == seen.state).unwrap_or(0);
    bytes.number(*rank).byte(state as u8).flag(seen.left).byte(seen.phase as u8);
    let (pid, started) = seen.process.unwrap_or((0, 0));
    bytes.flag(seen.process.is_some()).number(pid).long(started);
    bytes.long(seen.heartbeat).long(seen.step);
    bytes.flag(seen.resident.is_some()).long(seen.resident.unwrap_or(0));
    write_last(bytes, seen.last.as_ref());
}

/// The host is that of the connection.
fn read_beat(parts: &mut MessageParts<'_>) -> Option<RankBeat> {
    let rank = read_rank(parts)?;
    let state = *STATES.get(usize::from(parts.byte()?))?;
    let (left, phase) = (parts.flag()?, RankPhase::of_number(parts.byte()?)?);
    let (has_joined, process) = (parts.flag()?, (parts.number()?, parts.long()?));
    let (heartbeat, step) = (parts.long()?, parts.long()?);
    let (has_resident, resident) = (parts.flag()?, parts.long()?);
    let mut last = None;
    read_last(parts, &mut last)?;
    let seen = RankObservation {
        process: has_joined.then_some(process),
        state,
        left,
        heartbeat,
        phase,
        step,
        last,
        host: None,
        resident: has_resident.then_some(resident),
    };
    Some(RankBeat { rank, seen })
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// One message of every kind.
    pub(in super::super) fn samples() -> Vec<HostMessage> {
        let last = Some(LastOp { step: 7, name: "gather of block".to_owned(), index: 3, inside: true });
        let seen = RankObservation {
            process: Some((77, 1234)),
            state: ProcessState::Stopped,
            left: false,
            heartbeat: 9,
            phase: RankPhase::Saving,
            step: 12,
            last: last.clone(),
            host: None,
            resident: Some(1 << 40),
        };
        let absent = RankObservation {
            process: None,
            state: ProcessState::Absent,
            last: None,
            resident: None,
            phase: RankPhase::Starting,
            ..seen.clone()
        };
        let verdict = RankLost {
            rank: 1023,
            host: "n1.example.org".to_owned(),
            pid: 5,
            reason: LostReason::Stopped { seconds: 5 },
            last: last.clone(),
            by: None,
            waiting_in: None,
        };
        let name = "ä".repeat(127);
        vec![
            HostMessage::Hello { version: VERSION, world: 9, first: 4, ranks: 5, pid: 3, name: name.clone() },
            HostMessage::Beats(vec![RankBeat { rank: 4, seen }, RankBeat { rank: 5, seen: absent }]),
            HostMessage::Beats(Vec::new()),
            HostMessage::Lost(verdict.clone()),
            HostMessage::Lost(RankLost { last: None, reason: LostReason::Dead, ..verdict }),
            HostMessage::FirstStep { stop: true },
            HostMessage::LauncherRequests { stop: false, saves: 3 },
            HostMessage::Leaving,
            HostMessage::Gone,
            HostMessage::Welcome { pid: 4, name },
            HostMessage::Rejected("no room".to_owned()),
            HostMessage::Refused("2".to_owned()),
            HostMessage::Beat { last },
            HostMessage::State { first_step: 2, stop: true, saves: u32::MAX },
            HostMessage::AllLeft,
            HostMessage::Chunk { topic: Topic::Whole, total: 9, bytes: vec![7; 9] },
        ]
    }

    #[test]
    fn every_message_survives_its_bytes_and_no_shorter_or_longer_text_is_one() {
        for message in samples() {
            let bytes = message.to_bytes();
            assert_eq!(HostMessage::of_bytes(&bytes).as_ref(), Some(&message));
            if !matches!(message, HostMessage::Chunk { .. }) {
                for cut in 0..bytes.len() {
                    assert_eq!(HostMessage::of_bytes(&bytes[..cut]), None, "{message:?} of {cut} bytes");
                }
                assert_eq!(HostMessage::of_bytes(&[&bytes[..], &[0]].concat()), None, "{message:?}");
            }
        }
    }

    #[test]
    fn the_largest_messages_fit_a_frame() {
        let HostMessage::Beats(beats) = samples().remove(1) else { panic!("not the heartbeats") };
        let all = HostMessage::Beats(vec![beats[0].clone(); BEATS]);
        assert!(all.to_bytes().len() <= super::super::frame::MOST);
        let many = HostMessage::Beats(vec![beats[0].clone(); BEATS + 1]);
        assert_eq!(HostMessage::of_bytes(&many.to_bytes()), None);
        let reason = HostMessage::Refused("x".repeat(1 << 20)).to_bytes();
        assert!(
            matches!(HostMessage::of_bytes(&reason), Some(HostMessage::Refused(text)) if text.len() == MOST_REASON)
        );
    }
}
