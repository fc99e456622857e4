//! The terminal as it was before a view took it: a view that is killed or stopped leaves it raw, and Ctrl-C is then a key that
//! nobody reads.

use std::io::{self, Write};
use std::process::Child;

use rustix::termios::{OptionalActions, Termios, tcgetattr, tcsetattr};

use crate::process::{self, ProcessLiveness};

/// Leaves the alternate screen, shows the cursor, and ends colours.
const LEAVE: &[u8] = b"\x1b[?1049l\x1b[?25h\x1b[0m\r\n";

/// The modes of the terminal of this process.
#[derive(Debug)]
pub struct TerminalModes(Termios);

impl TerminalModes {
    /// Reads them from standard input.
    pub fn save() -> io::Result<Self> {
        Ok(Self(tcgetattr(io::stdin())?))
    }

    /// Restores them, the screen and the cursor, after a view that did not.
    pub fn restore(&self) -> io::Result<()> {
        tcsetattr(io::stdin(), OptionalActions::Now, &self.0)?;
        let mut out = io::stdout();
        out.write_all(LEAVE)?;
        out.flush()
    }
}

/// Whether a view in a child process is stopped, and so neither draws nor reads keys.
pub fn is_stopped(child: &Child) -> bool {
    process::state(child.id(), None) == ProcessLiveness::Stopped
}
