//! Writes stderr on a dedicated thread: a reader that stops reading blocks neither a step nor a stop.
//!
//! Text waits in a bounded queue. When it is full, the oldest notes are dropped and their number is reported. Errors
//! are kept.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use zeroth::base::{counted, was};

/// Maximum bytes in the queue.
const CAPACITY: usize = 1 << 20;
/// How long a writer waits for the reader, so that stderr keeps its order relative to stdout. A slower reader is not
/// waited for again until it reads.
const PATIENCE: Duration = Duration::from_millis(100);
/// How long the exiting process waits for the reader.
const LAST_PATIENCE: Duration = Duration::from_secs(2);

/// What happens to text that is not read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LineKind {
    /// Dropped if other text is queued; the next progress line replaces it.
    Progress,
    /// Dropped when the queue is full.
    Note,
    /// Kept.
    Error,
}

static STDERR: OnceLock<Option<Writer>> = OnceLock::new();

/// Writes to stderr without blocking on an unresponsive reader.
pub(crate) fn write(kind: LineKind, text: &str) {
    // If no thread can be created, write directly, which may block.
    match STDERR.get_or_init(|| Writer::spawn(io::stderr()).ok()) {
        Some(writer) => writer.write(kind, text),
        None => drop(io::stderr().write_all(text.as_bytes())),
    }
}

/// Keeps text back while something else has the terminal. Progress lines are dropped.
pub(crate) fn hold() {
    set_held(true);
}

/// Writes what was kept back.
pub(crate) fn release() {
    set_held(false);
}

fn set_held(is_held: bool) {
    if let Some(writer) = STDERR.get_or_init(|| Writer::spawn(io::stderr()).ok()) {
        writer.shared.lock().is_held = is_held;
        writer.shared.changed.notify_all();
    }
}

/// Waits at exit until everything is written, with a time limit.
pub(crate) fn flush() {
    if let Some(Some(writer)) = STDERR.get() {
        writer.wait(writer.shared.lock(), LAST_PATIENCE);
    }
}

#[derive(Default)]
struct Queue {
    texts: VecDeque<(LineKind, String)>,
    bytes: usize,
    /// Notes dropped since the last write.
    dropped: u64,
    is_writing: bool,
    /// Whether text is kept back.
    is_held: bool,
    /// Whether a wait for the reader timed out.
    is_stalled: bool,
}

impl Queue {
    fn is_idle(&self) -> bool {
        self.texts.is_empty() && !self.is_writing
    }

    fn push(&mut self, kind: LineKind, text: &str) {
        if kind == LineKind::Progress && (self.is_held || !self.is_idle()) {
            return;
        }
        while self.bytes + text.len() > CAPACITY {
            let Some(oldest) = self.texts.iter().position(|(kind, _)| *kind != LineKind::Error) else {
                // Only errors are queued: the first ones tell the cause.
                self.dropped += 1;
                return;
            };
            self.bytes -= self.texts.remove(oldest).map_or(0, |(_, text)| text.len());
            self.dropped += 1;
        }
        self.bytes += text.len();
        self.texts.push_back((kind, text.to_owned()));
    }

    fn pop(&mut self) -> Option<String> {
        let (_, text) = if self.is_held { None } else { self.texts.pop_front() }?;
        self.bytes -= text.len();
        Some(match std::mem::take(&mut self.dropped) {
            0 => text,
            dropped => format!(
                "({} {} dropped: standard error was not read)\n{text}",
                counted(dropped, "message"),
                was(dropped)
            ),
        })
    }
}

#[derive(Default)]
struct Shared {
    queue: Mutex<Queue>,
    changed: Condvar,
}

impl Shared {
    /// No holder of the lock panics.
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct Writer {
    shared: Arc<Shared>,
}

impl Writer {
    /// Starts the writer thread, which ends with the process.
    fn spawn(mut out: impl Write + Send + 'static) -> io::Result<Self> {
        let shared = Arc::new(Shared::default());
        let thread = Arc::clone(&shared);
        std::thread::Builder::new().name("stderr".to_owned()).spawn(move || {
            let mut queue = thread.lock();
            loop {
                let Some(text) = queue.pop() else {
                    queue = thread.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
                    continue;
                };
                queue.is_writing = true;
                drop(queue);
                // A closed reader or terminal is not an error.
                let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
                queue = thread.lock();
                (queue.is_writing, queue.is_stalled) = (false, false);
                thread.changed.notify_all();
            }
        })?;
        Ok(Self { shared })
    }

    fn write(&self, kind: LineKind, text: &str) {
        let mut queue = self.shared.lock();
        queue.push(kind, text);
        self.shared.changed.notify_all();
        if kind != LineKind::Progress && !queue.is_stalled && !queue.is_held {
            self.wait(queue, PATIENCE);
        }
    }

    /// Waits until everything is written, at most for `patience`.
    fn wait(&self, queue: MutexGuard<'_, Queue>, patience: Duration) {
        let is_busy = |queue: &mut Queue| !queue.is_idle();
        let waited = self.shared.changed.wait_timeout_while(queue, patience, is_busy);
        let (mut queue, _) = waited.unwrap_or_else(PoisonError::into_inner);
        queue.is_stalled = !queue.is_idle();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};
    use std::time::Instant;

    use super::*;

    /// A reader that reads once per message on its channel.
    struct Reader {
        lets: Receiver<()>,
        said: Arc<Mutex<String>>,
    }

    impl Write for Reader {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.lets.recv().map_err(io::Error::other)?;
            self.said.lock().unwrap().push_str(std::str::from_utf8(bytes).unwrap());
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn stalled() -> (Writer, Sender<()>, Arc<Mutex<String>>) {
        let (sender, lets) = channel();
        let said = Arc::default();
        let writer = Writer::spawn(Reader { lets, said: Arc::clone(&said) }).unwrap();
        (writer, sender, said)
    }

    #[test]
    fn writes_wait_for_a_responsive_reader() {
        let (writer, lets, said) = stalled();
        lets.send(()).unwrap();
        writer.write(LineKind::Note, "one\n");
        assert_eq!(*said.lock().unwrap(), "one\n");
    }

    #[test]
    fn an_unresponsive_reader_is_waited_for_once() {
        let (writer, lets, said) = stalled();
        let begun = Instant::now();
        for number in 0..1000 {
            writer.write(LineKind::Note, &format!("{number}\n"));
        }
        assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
        (0..1000).for_each(|_| lets.send(()).unwrap());
        writer.wait(writer.shared.lock(), Duration::from_mins(1));
        assert_eq!(said.lock().unwrap().lines().count(), 1000, "none was dropped");
        assert!(!writer.shared.lock().is_stalled);
    }

    #[test]
    fn text_that_is_held_comes_out_when_it_is_released() {
        let (writer, lets, said) = stalled();
        writer.shared.lock().is_held = true;
        writer.write(LineKind::Note, "one\n");
        writer.write(LineKind::Progress, "a bar");
        (0..2).for_each(|_| lets.send(()).unwrap());
        assert_eq!(*said.lock().unwrap(), "");
        writer.shared.lock().is_held = false;
        writer.write(LineKind::Note, "two\n");
        assert_eq!(*said.lock().unwrap(), "one\ntwo\n");
    }

    #[test]
    fn a_full_queue_drops_the_oldest_notes_and_keeps_errors() {
        let (writer, lets, said) = stalled();
        let long = "x".repeat(1 << 16);
        writer.write(LineKind::Error, "error: the cause\n");
        writer.write(LineKind::Error, "error: its effect\n");
        for number in 0..50 {
            writer.write(LineKind::Note, &format!("note {number} {long}\n"));
        }
        writer.write(LineKind::Progress, "a bar");
        assert!(writer.shared.lock().bytes <= CAPACITY);
        (0..100).for_each(|_| lets.send(()).unwrap());
        writer.wait(writer.shared.lock(), Duration::from_mins(1));
        let said = said.lock().unwrap();
        assert!(said.starts_with("error: the cause\n("), "{}", &said[..60]);
        assert!(said.contains("error: its effect\n"));
        assert!(said.contains(" messages were dropped: standard error was not read)\n"));
        assert!(!said.contains("note 0 ") && said.contains("note 49 ") && !said.contains("a bar"));
    }
}
