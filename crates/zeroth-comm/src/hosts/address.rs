//! Where the hosts meet rank 0: addresses of both families, and which port.

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, ToSocketAddrs, UdpSocket};

use crate::place::own_name;

/// Where the hosts of a job meet rank 0.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs, reason = "fields are named for what they hold")]
pub struct Rank0Address {
    /// A name or an address, IPv4 or IPv6.
    pub host: String,
    pub port: PortChoice,
}

/// The port where rank 0 listens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PortChoice {
    /// This one; 0 lets the system choose, for a coordinator that tells the others by other means.
    Given(u16),
    /// The first free one of the 16 behind this one, which a launcher's own store may hold. The token proves that it is ours.
    After(u16),
}

impl PortChoice {
    /// The ports in the order in which they are tried.
    pub(super) fn ports(self) -> impl Iterator<Item = u16> + Clone {
        let (first, count) = match self {
            Self::Given(port) => (port, 1),
            Self::After(port) => (port.saturating_add(1), 16),
        };
        (0..count).filter_map(move |more| first.checked_add(more))
    }
}

impl fmt::Display for Rank0Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let host = if self.host.contains(':') { format!("[{}]", self.host) } else { self.host.clone() };
        match self.port {
            PortChoice::Given(port) => write!(f, "{host}:{port}"),
            PortChoice::After(port) => {
                write!(f, "{host}, a port of {} to {}", port.saturating_add(1), port.saturating_add(16))
            }
        }
    }
}

impl Rank0Address {
    /// An address of this host that others may reach, with a port of the system's choice: for a rank 0 that tells the others
    /// by other means. `None` where there is no network. Nothing is sent to find it.
    pub fn on_this_host() -> Option<Self> {
        let own = own_addresses(&std::fs::read_to_string("/proc/net/fib_trie").unwrap_or_default());
        let by_name =
            || (own_name().as_str(), 0).to_socket_addrs().ok()?.map(|at| at.ip()).find(|ip| own.contains(ip));
        // The address from which the default route would be taken.
        let by_route = || {
            let socket = UdpSocket::bind("0.0.0.0:0").ok()?;
            socket.connect("192.0.2.1:9").ok()?;
            Some(socket.local_addr().ok()?.ip()).filter(|ip| own.contains(ip))
        };
        let chosen = by_name().or_else(by_route).or_else(|| own.first().copied())?;
        Some(Self { host: chosen.to_string(), port: PortChoice::Given(0) })
    }

    /// The addresses of the host, at most 16.
    pub(super) fn resolve(&self) -> io::Result<Vec<IpAddr>> {
        let host = self.host.trim_start_matches('[').trim_end_matches(']');
        let mut found: Vec<IpAddr> = Vec::new();
        for address in (host, 0).to_socket_addrs()?.map(|address| address.ip()) {
            if !found.contains(&address) && found.len() < 16 {
                found.push(address);
            }
        }
        Ok(found)
    }

    /// Listens at the first address and port that are free.
    ///
    /// Where this host knows its own name as one of the loopback, as Debian sets it up, others know it by a real one.
    pub(super) fn listen(&self) -> io::Result<TcpListener> {
        let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
        let mut addresses = self.resolve()?;
        let is_own_name = self.host == own_name() && self.host != "localhost";
        if is_own_name && addresses.iter().all(IpAddr::is_loopback) {
            addresses.splice(0..0, Self::on_this_host().and_then(|here| here.host.parse().ok()));
        }
        for address in addresses {
            for port in self.port.ports() {
                match TcpListener::bind(SocketAddr::new(address, port)) {
                    Ok(listener) => return Ok(listener),
                    Err(error) => last = error,
                }
            }
        }
        Err(last)
    }
}

/// The IPv4 addresses of this host in the kernel's routing table, without those of the loopback.
fn own_addresses(table: &str) -> Vec<IpAddr> {
    let mut found: Vec<IpAddr> = Vec::new();
    let mut last = None;
    for line in table.lines().map(str::trim) {
        if let Some(address) = line.strip_prefix("|-- ") {
            last = address.parse::<IpAddr>().ok();
        } else if line == "/32 host LOCAL"
            && let Some(address) = last.filter(|address| !address.is_loopback() && !found.contains(address))
        {
            found.push(address);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_this_host_are_those_that_the_kernel_routes_to_itself() {
        let table = "Main:\n  +-- 0.0.0.0/0 3 0 5\n     |-- 0.0.0.0\n        /0 universe UNICAST\n     +-- 10.1.0.0/24 2 0 2\n        \
            |-- 10.1.0.0\n           /24 link UNICAST\n        |-- 10.1.0.7\n           /32 host LOCAL\n        |-- 10.1.0.255\n           \
            /32 link BROADCAST\n     |-- 127.0.0.1\n        /32 host LOCAL\nLocal:\n        |-- 10.1.0.7\n           /32 host LOCAL\n";
        assert_eq!(own_addresses(table), ["10.1.0.7".parse::<IpAddr>().unwrap()]);
        if let Some(here) = Rank0Address::on_this_host() {
            let listener = here.listen().unwrap();
            assert!(
                !listener.local_addr().unwrap().ip().is_loopback()
                    && listener.local_addr().unwrap().port() > 0
            );
        }
    }

    fn local(host: &str, port: PortChoice) -> Rank0Address {
        Rank0Address { host: host.to_owned(), port }
    }

    #[test]
    fn a_taken_port_is_passed_over_where_several_are_allowed() {
        let free = local("127.0.0.1", PortChoice::Given(0)).listen().unwrap().local_addr().unwrap().port();
        // Far from the end of the ports, so that sixteen follow.
        let base = free.min(60_000) - 1;
        let first = local("127.0.0.1", PortChoice::After(base)).listen().unwrap();
        let second = local("127.0.0.1", PortChoice::After(base)).listen().unwrap();
        let ports = [&first, &second].map(|listener| listener.local_addr().unwrap().port());
        assert!(
            ports[0] < ports[1] && ports.iter().all(|port| (base + 1..=base + 16).contains(port)),
            "{ports:?}"
        );
        let error = local("127.0.0.1", PortChoice::Given(ports[0])).listen().unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
    }

    #[test]
    fn both_families_are_listened_at_and_shown() {
        for (host, shown) in [("127.0.0.1", "127.0.0.1:7"), ("::1", "[::1]:7"), ("localhost", "localhost:7")]
        {
            assert_eq!(local(host, PortChoice::Given(7)).to_string(), shown);
            match local(host, PortChoice::Given(0)).listen() {
                Ok(listener) => assert!(listener.local_addr().unwrap().ip().is_loopback()),
                // A machine without IPv6.
                Err(error) => assert!(host == "::1", "{host}: {error}"),
            }
        }
        assert!(local("[::1]", PortChoice::Given(0)).resolve().unwrap()[0].is_ipv6());
        assert_eq!(local("a", PortChoice::After(29500)).to_string(), "a, a port of 29501 to 29516");
        assert_eq!(PortChoice::After(u16::MAX).ports().last(), Some(u16::MAX));
    }
}
