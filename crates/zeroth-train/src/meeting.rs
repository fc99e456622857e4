//! What ranks tell each other between steps, beside the collectives of the program.

use bytemuck::{Pod, Zeroable, bytes_of, cast_slice_mut};
use zeroth_comm::{Handle, OpName};
use zeroth_engine::{Engine, RunError};

/// Every rank's words, in rank order. All ranks call it together, under the same name.
pub(crate) fn tell_all<T: Pod>(
    engine: &Engine<'_>,
    step: u64,
    name: &'static str,
    own: &T,
) -> Result<Vec<T>, RunError> {
    let Some(comm) = engine.comm() else { return Ok(vec![*own]) };
    let counts = vec![size_of::<T>(); comm.world()];
    let mut all = vec![T::zeroed(); comm.world()];
    let met = comm.all_gather(OpName::new(step, name, 0), bytes_of(own), cast_slice_mut(&mut all), &counts);
    met.and_then(Handle::wait).map_err(|source| RunError::Comm { step, op: name.to_owned(), source })?;
    Ok(all)
}

/// What somebody outside a run asks of it; looked at after every step. The strongest wish of all ranks counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum Wish {
    /// Nothing.
    #[default]
    GoOn,
    /// A checkpoint now.
    Save,
    /// A checkpoint now, and no further step.
    Stop,
    /// The same, by SIGHUP: every rank ends with its exit code, whichever rank got the signal.
    HangUp,
    /// The same, by SIGTERM.
    Terminate,
}

/// What a rank says after a step.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct AfterStep {
    wish: u8,
    /// Not 0: this rank has nothing of a checkpoint on its way to the disk.
    pub(crate) settled: u8,
}

impl AfterStep {
    pub(crate) fn new(wish: Wish, settled: bool) -> Self {
        Self { wish: wish as u8, settled: settled.into() }
    }

    pub(crate) fn wish(self) -> Wish {
        match self.wish {
            0 => Wish::GoOn,
            1 => Wish::Save,
            2 => Wish::Stop,
            3 => Wish::HangUp,
            _ => Wish::Terminate,
        }
    }
}
