//! Wire format of a job's socket: a join request of fixed size, and an answer that may carry the segment.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

use rustix::io::retry_on_intr;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};

/// Changes with the format, so that ranks of different versions do not misread each other.
const MAGIC: [u8; 8] = *b"zerothr1";
/// The longest text of an answer.
pub(super) const MOST: usize = 64 << 20;
const TOKEN: usize = 32;
const HEAD: usize = MAGIC.len() + 1 + TOKEN + 8;

/// A rank's request to join.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct JoinRequest {
    pub(super) rank: u32,
    pub(super) world: u32,
}

impl JoinRequest {
    pub(super) fn send(self, mut stream: &UnixStream) -> io::Result<()> {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&self.rank.to_le_bytes());
        bytes[12..].copy_from_slice(&self.world.to_le_bytes());
        stream.write_all(&bytes)
    }

    /// Whether all of it has arrived, so that [`Self::receive`] does not block.
    pub(super) fn arrives(stream: &UnixStream) -> io::Result<bool> {
        let mut bytes = [0_u8; 16];
        match rustix::net::recv(stream, &mut bytes[..], RecvFlags::PEEK | RecvFlags::DONTWAIT) {
            Ok((_, 0)) => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok((_, read)) => Ok(read == bytes.len()),
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => Ok(false),
            Err(errno) => Err(errno.into()),
        }
    }

    pub(super) fn receive(mut stream: &UnixStream) -> io::Result<Self> {
        let mut bytes = [0; 16];
        stream.read_exact(&mut bytes)?;
        check_magic(&bytes)?;
        let [_, numbers] = bytes.as_chunks::<8>().0 else {
            return Err(wrong("a join request of another size"));
        };
        let [rank, world] = [&numbers[..4], &numbers[4..]]
            .map(|number| u32::from_le_bytes(number.try_into().expect("half of eight bytes")));
        Ok(Self { rank, world })
    }
}

/// The kind of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum MessageKind {
    /// Accepted; the segment is attached.
    Admission = 1,
    /// The job is cancelled.
    Refusal = 2,
    /// This rank is rejected.
    Rejected = 3,
}

/// Rank 0's answer.
pub(super) struct JoinAnswer {
    pub(super) kind: MessageKind,
    pub(super) text: Vec<u8>,
    /// If accepted: the segment, and its token as text.
    pub(super) segment: Option<(OwnedFd, String)>,
}

/// Sends an answer; `segment` only if accepted.
pub(super) fn send(
    mut stream: &UnixStream,
    kind: MessageKind,
    segment: Option<(BorrowedFd<'_>, &str)>,
    text: &[u8],
) -> io::Result<()> {
    let mut head = Vec::with_capacity(HEAD);
    head.extend_from_slice(&MAGIC);
    head.push(kind as u8);
    let token = segment.map_or("", |(_, token)| token);
    head.extend_from_slice(format!("{token:TOKEN$}").as_bytes());
    head.extend_from_slice(&(text.len() as u64).to_le_bytes());
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut along = SendAncillaryBuffer::new(&mut space);
    let files = segment.map(|(file, _)| [file]);
    if let Some(files) = &files
        && !along.push(SendAncillaryMessage::ScmRights(files))
    {
        return Err(wrong("no room for one descriptor"));
    }
    // The descriptor travels with the first byte; the rest of a short write follows as plain bytes.
    let sent = retry_on_intr(|| {
        rustix::net::sendmsg(stream, &[IoSlice::new(&head)], &mut along, SendFlags::NOSIGNAL)
    })?;
    stream.write_all(&head[sent..])?;
    stream.write_all(text)
}

/// Whether an answer has begun to arrive or the peer has closed, so that [`receive`] does not block long.
pub(super) fn arrives(stream: &UnixStream) -> io::Result<bool> {
    let mut byte = [0_u8];
    match rustix::net::recv(stream, &mut byte[..], RecvFlags::PEEK | RecvFlags::DONTWAIT) {
        Ok((_, 0)) => Err(io::ErrorKind::UnexpectedEof.into()),
        Ok(_) => Ok(true),
        Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => Ok(false),
        Err(errno) => Err(errno.into()),
    }
}

pub(super) fn receive(mut stream: &UnixStream) -> io::Result<JoinAnswer> {
    let mut head = [0_u8; HEAD];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut along = RecvAncillaryBuffer::new(&mut space);
    let got = retry_on_intr(|| {
        rustix::net::recvmsg(stream, &mut [IoSliceMut::new(&mut head)], &mut along, RecvFlags::CMSG_CLOEXEC)
    })?;
    let mut files = along.drain().flat_map(|message| match message {
        RecvAncillaryMessage::ScmRights(files) => files.collect::<Vec<OwnedFd>>(),
        _ => Vec::new(),
    });
    let file = files.next();
    if got.bytes == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    stream.read_exact(&mut head[got.bytes..])?;
    check_magic(&head)?;
    let kind = match head[MAGIC.len()] {
        1 => MessageKind::Admission,
        2 => MessageKind::Refusal,
        3 => MessageKind::Rejected,
        _ => return Err(wrong("an answer of unknown kind")),
    };
    let token = String::from_utf8_lossy(&head[MAGIC.len() + 1..][..TOKEN]).into_owned();
    let len = head.last_chunk().map_or(u64::MAX, |bytes| u64::from_le_bytes(*bytes));
    if len > MOST as u64 {
        return Err(wrong("an answer that is too long"));
    }
    let mut text = vec![0; len as usize];
    stream.read_exact(&mut text)?;
    let segment = match (kind, file) {
        (MessageKind::Admission, Some(file)) => Some((file, token)),
        (MessageKind::Admission, None) => return Err(wrong("an admission without a segment")),
        _ => None,
    };
    Ok(JoinAnswer { kind, text, segment })
}

fn check_magic(bytes: &[u8]) -> io::Result<()> {
    if bytes.starts_with(&MAGIC) { Ok(()) } else { Err(wrong("a wrong magic number")) }
}

fn wrong(why: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}
