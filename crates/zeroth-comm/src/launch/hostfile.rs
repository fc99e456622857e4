//! DeepSpeed's hostfile: a line `HOST slots=N` a host, empty lines and comments after `#`. `--include` and `--exclude` choose
//! of it by name, as in `worker-0@worker-1:0,2`: all slots of one host, and two of another.

use std::fmt;
use std::fs::File;
use std::io::{self, Read as _};
use std::net::IpAddr;
use std::path::{Path, PathBuf};

/// The longest name of a host: that of the Domain Name System.
const LONGEST_NAME: usize = 255;
/// The most ranks of one host.
const MOST_SLOTS: u32 = 1024;
/// The longest file that is read.
const LONGEST_FILE: u64 = 16 << 20;

/// A hostfile or a choice of its hosts that is wrong.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "fields are named for what they hold")]
pub enum HostfileError {
    #[error("cannot read the hostfile {}: {source}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("{}: line {line}: {problem}", path.display())]
    Line { path: PathBuf, line: usize, problem: LineProblem },
    #[error("{} names no host: write a line `HOST slots=N` for each", path.display())]
    Empty { path: PathBuf },
    #[error("--include and --exclude exclude each other: name the hosts to use, or those to leave out")]
    BothFilters,
    #[error("{flag} {given}: {problem}")]
    Filter { flag: &'static str, given: String, problem: String },
    #[error("{flag} {given} leaves no slot of {}", path.display())]
    NothingLeft { flag: &'static str, given: String, path: PathBuf },
    #[error(
        "{}: line {line}: {name} is {address} here, which other hosts cannot reach: give the name or address by which all \
         {hosts} hosts reach it",
        path.display()
    )]
    Loopback { path: PathBuf, line: usize, name: String, address: IpAddr, hosts: usize },
}

/// What is wrong with a line.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "fields are named for what they hold")]
pub enum LineProblem {
    #[error("it is not UTF-8")]
    NotText,
    #[error("{0} has no slots: write `{0} slots=N` with its number of ranks")]
    NoSlots(String),
    #[error("slots={found} is not a number of ranks from 1 to {MOST_SLOTS}")]
    Slots { found: String },
    #[error("{0} has no place in a hostfile: a line is `HOST slots=N`")]
    Surplus(String),
    #[error("{name} is listed a second time, first in line {first}: add its slots up in one line")]
    Duplicate { name: String, first: usize },
    #[error("a name of {0} bytes: those of hosts have at most {LONGEST_NAME}")]
    LongName(usize),
    #[error(
        "{0} is no name or address of a host: those have letters, digits, `-`, `.`, `_` and in addresses `:` and `%`, and \
         begin with no `-`; users and ports belong into ~/.ssh/config"
    )]
    NoName(String),
}

/// A host and the slots of its ranks, in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostSlots {
    /// Its name or address, without brackets.
    pub name: String,
    /// Numbers of the slots: those of its GPUs.
    pub slots: Vec<u32>,
    /// Where the hostfile lists it, from 1.
    line: usize,
}

impl HostSlots {
    /// Whether some of the host's first slots are left out, so that its GPUs have to be named.
    pub fn is_chosen(&self) -> bool {
        self.slots.iter().zip(0..).any(|(slot, at)| *slot != at)
    }
}

impl fmt::Display for HostSlots {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({} slots)", self.name, self.slots.len())
    }
}

/// The hosts of a hostfile, in its order, which is that of ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hostfile {
    path: PathBuf,
    hosts: Vec<HostSlots>,
}

impl Hostfile {
    /// Reads a file.
    pub fn read(path: &Path) -> Result<Self, HostfileError> {
        let mut bytes = Vec::new();
        let read = File::open(path).and_then(|file| file.take(LONGEST_FILE).read_to_end(&mut bytes));
        read.map_err(|source| HostfileError::Read { path: path.to_owned(), source })?;
        Self::parse(path, &bytes)
    }

    /// Parses the contents of the file at `path`. Lines may end as on Windows.
    pub fn parse(path: &Path, bytes: &[u8]) -> Result<Self, HostfileError> {
        let mut hosts: Vec<HostSlots> = Vec::new();
        let bytes = bytes.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(bytes);
        for (text, line) in bytes.split(|byte| *byte == b'\n').zip(1..) {
            let wrong = |problem| HostfileError::Line { path: path.to_owned(), line, problem };
            let text = str::from_utf8(text).map_err(|_| wrong(LineProblem::NotText))?;
            let Some((name, slots)) = parse_line(text).map_err(wrong)? else { continue };
            if let Some(known) = hosts.iter().find(|known| known.name.eq_ignore_ascii_case(&name)) {
                return Err(wrong(LineProblem::Duplicate { name, first: known.line }));
            }
            hosts.push(HostSlots { name, slots: (0..slots).collect(), line });
        }
        if hosts.is_empty() {
            return Err(HostfileError::Empty { path: path.to_owned() });
        }
        Ok(Self { path: path.to_owned(), hosts })
    }

    /// The hosts.
    pub fn hosts(&self) -> &[HostSlots] {
        &self.hosts
    }

    /// All ranks.
    pub fn world(&self) -> usize {
        self.hosts.iter().map(|host| host.slots.len()).sum()
    }

    /// Keeps the slots that `--include` names, or those that `--exclude` does not. Their order stays.
    pub fn choose(self, include: Option<&str>, exclude: Option<&str>) -> Result<Self, HostfileError> {
        let (flag, given) = match (include, exclude) {
            (None, None) => return Ok(self),
            (Some(_), Some(_)) => return Err(HostfileError::BothFilters),
            (Some(given), None) => ("--include", given),
            (None, Some(given)) => ("--exclude", given),
        };
        let wrong = |problem| HostfileError::Filter { flag, given: given.to_owned(), problem };
        let mut named: Vec<Vec<u32>> = vec![Vec::new(); self.hosts.len()];
        for part in given.split('@') {
            let (at, slots) = self.parse_choice(part.trim()).map_err(wrong)?;
            named[at].extend(slots);
        }
        let Self { path, mut hosts } = self;
        for (host, named) in hosts.iter_mut().zip(&named) {
            host.slots.retain(|slot| named.contains(slot) == (flag == "--include"));
        }
        hosts.retain(|host| !host.slots.is_empty());
        if hosts.is_empty() {
            return Err(HostfileError::NothingLeft { flag, given: given.to_owned(), path });
        }
        Ok(Self { path, hosts })
    }

    /// The host that a part of a choice names, and its slots: all if it names none.
    fn parse_choice(&self, part: &str) -> Result<(usize, Vec<u32>), String> {
        let find = |name: &str| {
            let name = without_brackets(name);
            self.hosts.iter().position(|host| host.name.eq_ignore_ascii_case(name))
        };
        // The name alone first: addresses have colons, too.
        if let Some(at) = find(part) {
            return Ok((at, self.hosts[at].slots.clone()));
        }
        let (name, slots) = part.rsplit_once(':').unwrap_or((part, ""));
        let Some(at) = find(name).filter(|_| !slots.is_empty()) else {
            let known: Vec<&str> = self.hosts.iter().map(|host| host.name.as_str()).collect();
            let near = zeroth_base::nearest(name, known.iter().copied());
            let near = near.map(|near| format!(", did you mean {near}?")).unwrap_or_default();
            return Err(format!("{} has no host {part:?}{near}", self.path.display()));
        };
        let host = &self.hosts[at];
        let read = |slot: &str| {
            let number = slot.trim().parse().ok().filter(|slot| host.slots.contains(slot));
            number.ok_or_else(|| {
                let last = host.slots.len() - 1;
                format!("{} has no slot {:?}: its slots are 0 to {last}", host.name, slot.trim())
            })
        };
        Ok((at, slots.split(',').map(read).collect::<Result<_, _>>()?))
    }

    /// Refuses a host of several whose name `resolve` turns into an address of this host's loopback. Names that do not resolve
    /// may be ssh's.
    pub fn check_addresses(&self, resolve: impl Fn(&str) -> Vec<IpAddr>) -> Result<(), HostfileError> {
        if self.hosts.len() < 2 {
            return Ok(());
        }
        for HostSlots { name, line, .. } in &self.hosts {
            if let Some(address) = resolve(name).into_iter().find(IpAddr::is_loopback) {
                return Err(HostfileError::Loopback {
                    path: self.path.clone(),
                    line: *line,
                    name: name.clone(),
                    address,
                    hosts: self.hosts.len(),
                });
            }
        }
        Ok(())
    }
}

/// Host and slots of a line; `None` where it has neither.
fn parse_line(text: &str) -> Result<Option<(String, u32)>, LineProblem> {
    let text = text.split('#').next().unwrap_or_default();
    let mut words = text.split_whitespace();
    let Some(name) = words.next() else { return Ok(None) };
    let name = host(name)?;
    let Some(slots) = words.next().map(|word| word.strip_prefix("slots=").ok_or(word)) else {
        return Err(LineProblem::NoSlots(name));
    };
    let slots = slots.map_err(|word| LineProblem::Surplus(word.to_owned()))?;
    let is_digits = !slots.is_empty() && slots.bytes().all(|byte| byte.is_ascii_digit());
    let number = slots.parse().ok().filter(|number| is_digits && (1..=MOST_SLOTS).contains(number));
    let number = number.ok_or_else(|| LineProblem::Slots { found: slots.to_owned() })?;
    match words.next() {
        None => Ok(Some((name, number))),
        Some(word) => Err(LineProblem::Surplus(word.to_owned())),
    }
}

/// Checks a name or address, which becomes an argument of ssh.
fn host(name: &str) -> Result<String, LineProblem> {
    let inner = without_brackets(name);
    if inner.len() > LONGEST_NAME {
        return Err(LineProblem::LongName(inner.len()));
    }
    let is_part = |byte: u8| byte.is_ascii_alphanumeric() || b"-._:%".contains(&byte);
    let is_name = !inner.is_empty() && !inner.starts_with(['-', ':', '.', '%']) || inner.starts_with("::");
    // `host:22` would be taken for an address.
    let is_address = !inner.contains(':') || inner.split('%').next().is_some_and(is_ipv6);
    if is_name && is_address && inner.bytes().all(is_part) {
        Ok(inner.to_owned())
    } else {
        Err(LineProblem::NoName(name.to_owned()))
    }
}

fn is_ipv6(text: &str) -> bool {
    text.parse::<std::net::Ipv6Addr>().is_ok()
}

fn without_brackets(name: &str) -> &str {
    name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Hostfile, HostfileError> {
        Hostfile::parse(Path::new("hosts.txt"), text.as_bytes())
    }

    fn refused(text: &str) -> String {
        parse(text).unwrap_err().to_string()
    }

    fn shown(found: &Hostfile) -> Vec<(&str, &[u32])> {
        found.hosts().iter().map(|host| (host.name.as_str(), host.slots.as_slice())).collect()
    }

    #[test]
    fn hosts_keep_their_order_and_slots() {
        let found = parse("# GPUs\n\n  worker-2\tslots=2   # the old one\nworker-1 slots=1\n").unwrap();
        assert_eq!(shown(&found), [("worker-2", &[0, 1][..]), ("worker-1", &[0][..])]);
        assert_eq!(found.world(), 3);
        // As an editor on Windows writes it.
        let windows = "\u{feff}worker-2 slots=2\r\n\r\nworker-1 slots=1\r\n";
        assert_eq!(shown(&parse(windows).unwrap()), shown(&found));
    }

    #[test]
    fn addresses_and_long_names_are_hosts() {
        let found = parse("10.0.0.1 slots=1\n[fd00::2] slots=1\nfe80::1%eth0 slots=1\n::2 slots=1").unwrap();
        let names: Vec<&str> = found.hosts().iter().map(|host| host.name.as_str()).collect();
        assert_eq!(names, ["10.0.0.1", "fd00::2", "fe80::1%eth0", "::2"]);
        let long = "a".repeat(255);
        assert_eq!(parse(&format!("{long} slots=1")).unwrap().hosts()[0].name, long);
        let message = refused(&format!("a slots=1\n{long}b slots=1"));
        assert_eq!(message, "hosts.txt: line 2: a name of 256 bytes: those of hosts have at most 255");
    }

    #[test]
    fn every_wrong_line_is_named_with_its_remedy() {
        for (text, message) in [
            ("", "hosts.txt names no host: write a line `HOST slots=N` for each"),
            ("# a slots=1\n", "hosts.txt names no host: write a line `HOST slots=N` for each"),
            ("a slots=1\nb", "hosts.txt: line 2: b has no slots: write `b slots=N` with its number of ranks"),
            ("a slots=0", "hosts.txt: line 1: slots=0 is not a number of ranks from 1 to 1024"),
            ("a slots=1025", "hosts.txt: line 1: slots=1025 is not a number of ranks from 1 to 1024"),
            ("a slots=+1", "hosts.txt: line 1: slots=+1 is not a number of ranks from 1 to 1024"),
            ("a slots=", "hosts.txt: line 1: slots= is not a number of ranks from 1 to 1024"),
            ("a 4", "hosts.txt: line 1: 4 has no place in a hostfile: a line is `HOST slots=N`"),
            (
                "a slots=4 max_slots=8",
                "hosts.txt: line 1: max_slots=8 has no place in a hostfile: a line is `HOST slots=N`",
            ),
            (
                "a slots=1\n\nA slots=2",
                "hosts.txt: line 3: A is listed a second time, first in line 1: add its slots up in one line",
            ),
        ] {
            assert_eq!(refused(text), message, "{text:?}");
        }
        for name in
            ["-oProxyCommand=sh", "me@host", "host:22", "$(sh)", "a;b", "[]", "ho\u{f6}st", "..", ":1"]
        {
            let message = refused(&format!("{name} slots=1"));
            assert!(
                message.starts_with(&format!("hosts.txt: line 1: {name} is no name or address")),
                "{message}"
            );
        }
        let error = Hostfile::parse(Path::new("hosts.txt"), b"a slots=1\n\xff slots=1").unwrap_err();
        assert_eq!(error.to_string(), "hosts.txt: line 2: it is not UTF-8");
        let error = Hostfile::read(Path::new("/no-such/hosts.txt")).unwrap_err().to_string();
        assert!(error.starts_with("cannot read the hostfile /no-such/hosts.txt: "), "{error}");
    }

    const THREE: &str = "a slots=4\nb slots=2\nfd00::3 slots=2";

    /// Hosts and slots that a choice leaves.
    fn chosen(include: Option<&str>, exclude: Option<&str>) -> Result<Vec<(String, Vec<u32>)>, String> {
        let found = parse(THREE).unwrap().choose(include, exclude).map_err(|error| error.to_string())?;
        Ok(found.hosts.into_iter().map(|host| (host.name, host.slots)).collect())
    }

    #[test]
    fn choices_are_those_of_deepspeed() {
        let all = |hosts: &[(&str, &[u32])]| -> Result<Vec<(String, Vec<u32>)>, String> {
            Ok(hosts.iter().map(|(name, slots)| ((*name).to_owned(), slots.to_vec())).collect())
        };
        assert_eq!(chosen(None, None), all(&[("a", &[0, 1, 2, 3]), ("b", &[0, 1]), ("fd00::3", &[0, 1])]));
        // The order of the file stays, and a slot counts once.
        assert_eq!(chosen(Some("b@a:2,0,2"), None), all(&[("a", &[0, 2]), ("b", &[0, 1])]));
        assert_eq!(chosen(Some("fd00::3"), None), all(&[("fd00::3", &[0, 1])]));
        assert_eq!(chosen(Some("[fd00::3]:1"), None), all(&[("fd00::3", &[1])]));
        assert_eq!(chosen(None, Some("a:0@fd00::3")), all(&[("a", &[1, 2, 3]), ("b", &[0, 1])]));
        let is_chosen =
            |include| parse(THREE).unwrap().choose(Some(include), None).unwrap().hosts()[0].is_chosen();
        assert_eq!(["a:0,1", "a:0,2", "a:1"].map(is_chosen), [false, true, true]);
    }

    #[test]
    fn wrong_choices_name_what_is_there() {
        for (include, exclude, message) in [
            (Some("worker"), None, "--include worker: hosts.txt has no host \"worker\""),
            (Some("a:4"), None, "--include a:4: a has no slot \"4\": its slots are 0 to 3"),
            (Some("a:"), None, "--include a:: hosts.txt has no host \"a:\""),
            (Some(""), None, "--include : hosts.txt has no host \"\""),
            (None, Some("b:x"), "--exclude b:x: b has no slot \"x\": its slots are 0 to 1"),
            (None, Some("a@b@fd00::3"), "--exclude a@b@fd00::3 leaves no slot of hosts.txt"),
        ] {
            let found = chosen(include, exclude).unwrap_err();
            assert!(found.starts_with(message), "{found}");
        }
        let both = chosen(Some("a"), Some("b")).unwrap_err();
        assert!(both.starts_with("--include and --exclude exclude each other"), "{both}");
    }

    #[test]
    fn loopback_is_refused_among_several_hosts() {
        let resolve = |name: &str| -> Vec<IpAddr> {
            match name {
                "a" => vec!["10.0.0.1".parse().unwrap()],
                "localhost" => vec!["127.0.0.1".parse().unwrap()],
                _ => Vec::new(),
            }
        };
        parse("a slots=1\nalias slots=1").unwrap().check_addresses(resolve).unwrap();
        parse("localhost slots=2").unwrap().check_addresses(resolve).unwrap();
        let error = parse("a slots=1\nlocalhost slots=1").unwrap().check_addresses(resolve).unwrap_err();
        assert_eq!(
            error.to_string(),
            "hosts.txt: line 2: localhost is 127.0.0.1 here, which other hosts cannot reach: give the name or address by \
             which all 2 hosts reach it"
        );
    }
}
