//! nf4, the 4-bit format of QLoRA: the codes and scales of bitsandbytes with blocks of 64 and without double quantisation.
//!
//! An element is codebook\[code\] · scale of its block, the scale being the block's largest magnitude. Two codes share a byte,
//! the first in the high half. Codes and scales lie in records, so that whole records can be sharded and moved.

use bytemuck::{Pod, Zeroable};

/// Elements that share a scale.
pub const NF4_BLOCK: usize = 64;

/// The values of the codes 0 to 15.
pub const NF4_CODEBOOK: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// The code of 0.
pub const NF4_ZERO: u8 = 7;

/// Midpoints between neighbouring values: an element has as its code the number of midpoints below it.
pub const NF4_MIDPOINTS: [f32; 15] = {
    let mut midpoints = [0.0; 15];
    let mut at = 0;
    while at < midpoints.len() {
        midpoints[at] = f32::midpoint(NF4_CODEBOOK[at], NF4_CODEBOOK[at + 1]);
        at += 1;
    }
    midpoints
};

/// 2,048 elements: 4.5 bits each. What is beyond the end of a tensor has code [`NF4_ZERO`] and scale 0.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Pod, Zeroable)]
pub struct Nf4Record {
    /// The codes, two a byte.
    pub codes: [u8; Nf4Record::ELEMENTS / 2],
    /// The scale of each block.
    pub scales: [f32; Nf4Record::ELEMENTS / NF4_BLOCK],
}

impl Nf4Record {
    /// Elements of a record.
    pub const ELEMENTS: usize = 2048;
    /// Bytes of a record.
    pub const BYTES: usize = size_of::<Self>();

    /// An element in f32.
    pub fn element(&self, place: usize) -> f32 {
        let pair = self.codes[place / 2];
        let code = if place.is_multiple_of(2) { pair >> 4 } else { pair & 15 };
        NF4_CODEBOOK[usize::from(code)] * self.scales[place / NF4_BLOCK]
    }
}

const _: () = assert!(Nf4Record::BYTES == 1152, "4.5 bits an element");
