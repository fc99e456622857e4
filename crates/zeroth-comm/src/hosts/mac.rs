//! Authentication of what hosts tell each other: HMAC-SHA256, compared in constant time.

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

/// Bytes of a tag.
pub(super) const TAG: usize = 32;

/// A key; its first block is hashed once.
#[derive(Clone)]
pub(super) struct MacKey(Hmac<Sha256>);

impl MacKey {
    pub(super) fn new(key: &[u8]) -> Self {
        Self(Hmac::new_from_slice(key).expect("HMAC takes keys of any length"))
    }

    /// The tag of parts, whose lengths must follow from the first ones.
    pub(super) fn tag(&self, parts: &[&[u8]]) -> [u8; TAG] {
        self.over(parts).finalize().into_bytes().into()
    }

    /// Whether a tag is that of the parts.
    pub(super) fn verifies(&self, parts: &[&[u8]], tag: &[u8]) -> bool {
        self.over(parts).verify_slice(tag).is_ok()
    }

    fn over(&self, parts: &[&[u8]]) -> Hmac<Sha256> {
        let mut mac = self.0.clone();
        for part in parts {
            mac.update(part);
        }
        mac
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_are_those_of_rfc_4231() {
        // Test case 2.
        let key = MacKey::new(b"Jefe");
        let tag = key.tag(&[b"what do ya want ", b"for nothing?"]);
        let [high, low] = [&tag[..16], &tag[16..]].map(|half| u128::from_be_bytes(half.try_into().unwrap()));
        assert_eq!(high, 0x5bdc_c146_bf60_754e_6a04_2426_0895_75c7);
        assert_eq!(low, 0x5a00_3f08_9d27_3983_9dec_58b9_64ec_3843);
        assert!(key.verifies(&[b"what do ya want for nothing?"], &tag));
        assert!(!key.verifies(&[b"what do ya want for nothing!"], &tag));
        assert!(!key.verifies(&[b"what do ya want for nothing?"], &tag[..31]));
    }
}
