//! Any bytes on the control connection between hosts: from a stranger, and from a peer that knows the token.
#![no_main]

use libfuzzer_sys::fuzz_target;
use zeroth_comm::hosts::{believed_frames, is_message};

fuzz_target!(|bytes: &[u8]| {
    // Without the key no frame is believed.
    assert_eq!(believed_frames(bytes), 0);
    // With it, they are a message that reads again from its own bytes, or none.
    is_message(bytes);
});
