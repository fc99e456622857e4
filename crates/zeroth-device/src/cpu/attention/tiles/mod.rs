//! Attention on AMX tiles, for bf16. The instructions are written in assembly, because the compiler has no stable names for
//! them.
//!
//! All matrices that tiles read or write are panels of scratch, 32 rows or columns each, so all tiles are configured in
//! full once. What a panel holds beyond a sequence's end or a head's last element is arbitrary: it reaches only rows and
//! columns of results that nobody reads. Along a sum, panels are filled up with zeros.
#![allow(unsafe_code, reason = "tile and vector instructions take pointers")]

mod backward;
mod differentiate;
mod forward;
mod queue;
mod softmax;

use std::arch::asm;

pub(super) use backward::backward;
pub(super) use forward::forward;
use zeroth_base::DType;

use crate::cpu::element::Element;
use crate::cpu::path::Path;

/// Bytes of a step of a panel: two tiles of 16 lines of 64 bytes. Elements of a line.
const STEP: usize = 2048;
const LINE: usize = 32;

/// Whether tiles multiply this type on this path.
pub(super) fn fit<T: Element>(path: Path) -> bool {
    path == Path::Amx && T::DTYPE == DType::Bf16
}

/// The calling thread's tiles, all configured in full, until it is dropped.
struct Tiles;

/// What `ldtilecfg` reads: palette 1, and rows and bytes a row of each tile.
#[repr(C, align(64))]
struct Config {
    palette: u8,
    reserved: [u8; 15],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

impl Tiles {
    fn configure() -> Self {
        let mut config = Config { palette: 1, reserved: [0; 15], row_bytes: [0; 16], rows: [0; 16] };
        config.row_bytes[..8].fill(64);
        config.rows[..8].fill(16);
        // SAFETY: `Path::available` has asked for the tiles, and the configuration is within their sizes.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const config, options(nostack, readonly)) }
        Self
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        // The thread's state is small again for whoever switches it.
        // SAFETY: as in `configure`.
        unsafe { asm!("tilerelease", options(nostack, nomem)) }
    }
}
