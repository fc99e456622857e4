//! Signals to a launcher: each is passed on to all ranks. The second SIGINT ends them.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::Sender;
use std::time::Duration;

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2, SIGXCPU};
use signal_hook::flag::register;
use zeroth::comm::launch::RankCommand;

use crate::stop_signal::StopSignal;

/// Polling interval for signals.
const LOOK: Duration = Duration::from_millis(20);
const SIGNALS: [i32; 6] = [SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2, SIGXCPU];

/// The signals that this launcher has received.
pub(super) struct PassedSignals {
    /// The number of the first that stops ranks; 0 for none.
    stop: Arc<AtomicUsize>,
    ended: Arc<AtomicBool>,
}

impl PassedSignals {
    /// Sends what is asked for to `commands`, until this is dropped or nobody receives any more.
    pub(super) fn pass_on(commands: Sender<RankCommand>) -> io::Result<Self> {
        let flags = SIGNALS.map(|signal| (signal, Arc::new(AtomicBool::new(false))));
        for (signal, flag) in &flags {
            register(*signal, Arc::clone(flag))?;
        }
        let (stop, ended) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
        let passed = Self { stop: Arc::clone(&stop), ended: Arc::clone(&ended) };
        std::thread::Builder::new().name("signals".to_owned()).spawn(move || {
            let mut interrupts = 0;
            while !ended.load(Ordering::Relaxed) {
                for (signal, flag) in &flags {
                    if !flag.swap(false, Ordering::Relaxed) {
                        continue;
                    }
                    interrupts += usize::from(*signal == SIGINT);
                    if ![SIGUSR1, SIGUSR2].contains(signal) {
                        let first = *signal as usize;
                        let _ = stop.compare_exchange(0, first, Ordering::Relaxed, Ordering::Relaxed);
                    }
                    let command =
                        if interrupts > 1 { Some(RankCommand::Kill) } else { RankCommand::signal(*signal) };
                    if command.is_some_and(|command| commands.send(command).is_err()) {
                        return;
                    }
                }
                std::thread::sleep(LOOK);
            }
        })?;
        Ok(passed)
    }

    /// The signal that asked all ranks to stop.
    pub(super) fn stop(&self) -> Option<StopSignal> {
        match i32::try_from(self.stop.load(Ordering::Relaxed)).unwrap_or(0) {
            SIGINT => Some(StopSignal::Interrupt),
            SIGTERM => Some(StopSignal::Terminate),
            SIGHUP => Some(StopSignal::HangUp),
            SIGXCPU => Some(StopSignal::CpuTime),
            _ => None,
        }
    }
}

impl Drop for PassedSignals {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
    }
}
