//! What a job begins with, as the coordinator sends it to all hosts, and parts of a gather.

use super::codec::{MessageBytes, MessageParts};
use crate::place::{HostTable, MOST_HOSTS, MOST_NAME};

/// Everything that hosts must have in common before their ranks join.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct JobSettings {
    /// Bytes of a rank's region of shared memory.
    pub(super) region: u64,
    pub(super) hosts: HostTable,
    /// The caller's message to all ranks.
    pub(super) message: Vec<u8>,
}

impl JobSettings {
    pub(super) fn to_bytes(region: u64, hosts: &HostTable, message: &[u8]) -> Vec<u8> {
        let mut bytes = MessageBytes::default();
        bytes.long(region).number(hosts.hosts().len() as u32);
        for host in hosts.hosts() {
            bytes.number(host.ranks as u32).text(&host.name, MOST_NAME);
        }
        bytes.rest(message);
        bytes.0
    }

    pub(super) fn of_bytes(bytes: &[u8]) -> Option<Self> {
        let mut parts = MessageParts(bytes);
        let region = parts.long()?;
        let count = parts.number().filter(|count| *count as usize <= MOST_HOSTS)?;
        let hosts: Option<Vec<(String, usize)>> = (0..count)
            .map(|_| {
                let ranks = parts.number()? as usize;
                Some((parts.text(MOST_NAME)?, ranks))
            })
            .collect();
        let hosts = HostTable::in_order(hosts?).ok()?;
        Some(Self { region, hosts, message: parts.rest().to_vec() })
    }
}

/// The bytes of some ranks, one after the other.
pub(super) fn join_parts(parts: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = MessageBytes::default();
    for part in parts {
        bytes.part(part);
    }
    bytes.0
}

/// The bytes of each of `count` ranks; `None` where there are others.
pub(super) fn split_parts(bytes: &[u8], count: usize) -> Option<Vec<Vec<u8>>> {
    let mut parts = MessageParts(bytes);
    let split = (0..count).map(|_| parts.part().map(<[u8]>::to_vec)).collect::<Option<_>>()?;
    parts.end()?;
    Some(split)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_and_parts_survive_their_bytes_and_nothing_shorter_counts() {
        let hosts = HostTable::in_order([("n1".to_owned(), 2), ("n2".to_owned(), 3)]).unwrap();
        let bytes = JobSettings::to_bytes(8 << 20, &hosts, b"settings");
        let settings = JobSettings { region: 8 << 20, hosts, message: b"settings".to_vec() };
        assert_eq!(JobSettings::of_bytes(&bytes), Some(settings));
        for cut in 0..bytes.len() - b"settings".len() {
            assert_eq!(JobSettings::of_bytes(&bytes[..cut]), None);
        }
        assert_eq!(JobSettings::of_bytes(&[0xff; 64]), None);

        let parts = [b"one".to_vec(), Vec::new(), b"three".to_vec()];
        let joined = join_parts(&parts);
        assert_eq!(split_parts(&joined, 3).as_deref(), Some(&parts[..]));
        assert_eq!(split_parts(&joined, 2), None);
        assert_eq!(split_parts(&joined, 4), None);
    }
}
