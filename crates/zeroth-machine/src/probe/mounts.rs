//! What is mounted where: the lines of `/proc/self/mountinfo`.

use std::path::{Path, PathBuf};

use super::tree::{Tree, Unreadable};

/// One mounted filesystem.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Mount {
    /// The folder of the filesystem that is mounted: `/` unless a part of it is (a bind mount, a container).
    pub(super) root: PathBuf,
    /// Where it is mounted.
    pub(super) point: PathBuf,
    /// `ext4`, `overlay`, `tmpfs`, `cgroup2`.
    pub(super) kind: String,
    /// The device, share or name that is mounted.
    pub(super) source: String,
    /// Options of the filesystem, separated by commas; a cgroup v1 lists its controllers here.
    pub(super) options: String,
}

/// All mounts that this process sees, in the order they were made.
pub(super) fn mounts(tree: &Tree) -> Result<Vec<Mount>, Unreadable> {
    Ok(tree.read("/proc/self/mountinfo")?.lines().filter_map(parse).collect())
}

/// The mount that holds an absolute path: the deepest, and of several at one point the one made last.
pub(super) fn mount_of<'a>(mounts: &'a [Mount], path: &Path) -> Option<&'a Mount> {
    mounts
        .iter()
        .filter(|mount| path.starts_with(&mount.point))
        .max_by_key(|mount| mount.point.components().count())
}

/// `36 35 98:0 /part /point rw,noatime shared:1 - ext3 /dev/sda1 rw`: the optional fields end at the dash.
fn parse(line: &str) -> Option<Mount> {
    let (place, filesystem) = line.split_once(" - ")?;
    let mut place = place.split(' ').skip(3);
    let mut filesystem = filesystem.split(' ');
    Some(Mount {
        root: unescape(place.next()?).into(),
        point: unescape(place.next()?).into(),
        kind: filesystem.next()?.to_owned(),
        source: unescape(filesystem.next()?),
        options: filesystem.next().unwrap_or_default().to_owned(),
    })
}

/// The kernel writes space, tab, newline and backslash as a backslash and three octal digits.
fn unescape(text: &str) -> String {
    let mut plain = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('\\') {
        plain.push_str(&rest[..at]);
        let code = rest.get(at + 1..at + 4).and_then(|digits| u8::from_str_radix(digits, 8).ok());
        plain.push(code.map_or('\\', char::from));
        rest = &rest[at + if code.is_some() { 4 } else { 1 }..];
    }
    plain.push_str(rest);
    plain
}

#[cfg(test)]
mod tests {
    use super::super::tree::Recorded;
    use super::*;

    // Lines of a Docker container, the example of proc(5), and a share with a space in its name.
    const MOUNTINFO: &str = "\
1 0 254:0 / / rw,relatime - ext4 /dev/vda rw,discard
562 461 0:51 / / rw,relatime master:196 - overlay overlay rw,lowerdir=/l/A:/l/B,upperdir=/u,workdir=/w
563 562 0:54 / /proc rw,nosuid,nodev,noexec,relatime - proc proc rw
36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 shared:2 - ext3 /dev/root rw,errors=continue
700 562 0:60 / /data\\040sets rw shared:7 - nfs4 server:/my\\040data rw,vers=4.2
701 562 259:1 / /data\\040sets/fast rw - xfs /dev/nvme0n1p1 rw
";

    fn recorded() -> Vec<Mount> {
        mounts(&Recorded::new([("/proc/self/mountinfo", MOUNTINFO)]).tree).unwrap()
    }

    #[test]
    fn optional_fields_and_escaped_names_are_read() {
        let mounts = recorded();
        assert_eq!(mounts.len(), 6);
        assert_eq!(mounts[3].root, Path::new("/mnt1"));
        assert_eq!(mounts[3].point, Path::new("/mnt2"));
        assert_eq!((mounts[3].kind.as_str(), mounts[3].source.as_str()), ("ext3", "/dev/root"));
        assert_eq!(mounts[4].point, Path::new("/data sets"));
        assert_eq!(mounts[4].source, "server:/my data");
    }

    #[test]
    fn the_deepest_and_latest_mount_holds_a_path() {
        let mounts = recorded();
        let kind = |path: &str| mount_of(&mounts, Path::new(path)).map(|mount| mount.kind.as_str());
        assert_eq!(kind("/home/me"), Some("overlay"), "the root was mounted over");
        assert_eq!(kind("/data sets/corpus"), Some("nfs4"));
        assert_eq!(kind("/data sets/fast/swap"), Some("xfs"));
        assert_eq!(kind("/data sets/faster"), Some("nfs4"), "names are compared whole");
    }

    #[test]
    fn broken_lines_are_left_out() {
        for line in ["", "36 35 98:0 / /x rw", "36 35 - ext4", "1 2 3 / /a\\9 rw - ext4"] {
            assert_eq!(parse(line), None, "{line}");
        }
        assert_eq!(unescape("a\\9b\\"), "a\\9b\\");
    }
}
