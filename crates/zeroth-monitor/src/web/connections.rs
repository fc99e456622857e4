//! Who is connected. Every user of this machine can connect, so a connection is a stranger's until its request has shown a
//! token: of too many strangers the oldest leaves, and none of them keeps a browser out.

use std::collections::VecDeque;
use std::io;
use std::net::{Shutdown, TcpStream};
use std::sync::{Arc, Mutex};

use super::locked;

/// Strangers at once.
const MOST_STRANGERS: usize = 64;
/// Authenticated connections at once, such as open pages.
const MOST_GUESTS: usize = 64;

/// The open connections.
#[derive(Default)]
pub(super) struct Connections(Mutex<Admitted>);

#[derive(Default)]
struct Admitted {
    /// Oldest first.
    strangers: VecDeque<(u64, TcpStream)>,
    guests: usize,
    /// Counts connections.
    count: u64,
}

impl Connections {
    /// Takes a stranger in.
    pub(super) fn admit(self: &Arc<Self>, stream: &TcpStream) -> io::Result<Connection> {
        let handle = stream.try_clone()?;
        let mut all = locked(&self.0);
        if all.strangers.len() == MOST_STRANGERS
            && let Some((_, oldest)) = all.strangers.pop_front()
        {
            // Its thread waits for the socket, and ends with it.
            let _ = oldest.shutdown(Shutdown::Both);
        }
        all.count += 1;
        let id = all.count;
        all.strangers.push_back((id, handle));
        Ok(Connection { of: Arc::clone(self), id, is_guest: false })
    }
}

/// A connection, until it is dropped.
pub(super) struct Connection {
    of: Arc<Connections>,
    id: u64,
    is_guest: bool,
}

impl Connection {
    /// Its request has shown a token: no stranger drives it out any more. False where there are too many of these.
    pub(super) fn authenticate(&mut self) -> bool {
        let mut all = locked(&self.of.0);
        if self.is_guest {
            return true;
        }
        if all.guests == MOST_GUESTS {
            return false;
        }
        all.guests += 1;
        all.strangers.retain(|(id, _)| *id != self.id);
        self.is_guest = true;
        true
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        let mut all = locked(&self.of.0);
        if self.is_guest {
            all.guests -= 1;
        } else {
            all.strangers.retain(|(id, _)| *id != self.id);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::net::{Ipv4Addr, TcpListener};

    use super::*;

    /// Both ends of a connection.
    fn pair(listener: &TcpListener) -> (TcpStream, TcpStream) {
        let client =
            TcpStream::connect((Ipv4Addr::LOCALHOST, listener.local_addr().unwrap().port())).unwrap();
        (client, listener.accept().unwrap().0)
    }

    #[test]
    fn the_oldest_stranger_leaves_and_guests_stay() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let all = Arc::new(Connections::default());
        let mut admit = || {
            let (client, server) = pair(&listener);
            let connection = all.admit(&server).unwrap();
            (client, server, connection)
        };
        let mut guest = admit();
        assert!(guest.2.authenticate() && guest.2.authenticate(), "once is enough");
        let mut strangers: Vec<_> = std::iter::repeat_with(&mut admit).take(MOST_STRANGERS + 2).collect();
        for (number, (client, ..)) in strangers.iter_mut().enumerate() {
            client.set_nonblocking(true).unwrap();
            let is_closed = client.read(&mut [0]).is_ok_and(|count| count == 0);
            assert_eq!(is_closed, number < 2, "{number}");
        }
        guest.0.set_nonblocking(true).unwrap();
        assert!(guest.0.read(&mut [0]).is_err(), "a guest stays");
        drop(strangers);
        let mut guests: Vec<_> = std::iter::repeat_with(&mut admit).take(MOST_GUESTS).collect();
        let taken = guests.iter_mut().filter_map(|(.., connection)| connection.authenticate().then_some(()));
        assert_eq!(taken.count(), MOST_GUESTS - 1, "one place was taken");
        drop(guest);
        assert!(guests.last_mut().unwrap().2.authenticate(), "and is free again");
        drop(guests);
        let all = locked(&all.0);
        assert_eq!((all.strangers.len(), all.guests), (0, 0));
    }
}
