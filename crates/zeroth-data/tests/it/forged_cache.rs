//! Token caches with inconsistent numbers but valid checksums.

use std::fs;
use std::path::Path;

use sha2::{Digest as _, Sha256};
use zeroth_data::{CacheFolder, Encoder, EncoderOptions, PrepareOptions, Samples, Truncation, prepare};

const ROWS: &str = "{\"input_ids\": [1, 2, 3]}\n{\"input_ids\": [4, 5]}\n{\"input_ids\": [13]}\n\
                    {\"input_ids\": [14, 15]}\n";

#[test]
fn inconsistent_headers_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let rows = folder.path().join("rows.jsonl");
    fs::write(&rows, ROWS).unwrap();
    let encoder = Encoder::open(Path::new("there is no tokenizer"), EncoderOptions::new(100)).unwrap();
    let options =
        PrepareOptions { max_length: 6, truncation: Truncation::Drop, max_samples: None, packing: true };
    let make = || {
        let cache = CacheFolder::at(folder.path().join("cache"));
        prepare(std::slice::from_ref(&rows), &encoder, &options, &cache).unwrap()
    };
    let path = make().path;
    assert!(make().found);
    let whole = fs::read(&path).unwrap();
    let forged = |at: usize, value: u64| {
        let mut bytes = whole.clone();
        bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
        let body = Sha256::digest(&bytes[256..]);
        bytes[192..224].copy_from_slice(&body);
        let header = Sha256::digest(&bytes[..224]);
        bytes[224..256].copy_from_slice(&header);
        bytes
    };
    // Trained tokens, longest sample, packs, longest pack, most samples in a pack.
    let other = folder.path().join("x.tokens");
    for at in [40, 48, 80, 88, 96] {
        for value in [1 << 62, u64::MAX] {
            fs::write(&other, forged(at, value)).unwrap();
            let message = Samples::open(&other).unwrap_err().to_string();
            assert!(message.contains("is not a valid token cache: its "), "{message}");
        }
    }
    // Sample starts after the 8 tokens and their labels; pack starts; pack members.
    let (starts, packs, members) = (320, 448, 512);
    for (at, value) in [
        (starts, 1),
        (starts + 8, 1 << 62),
        (starts + 16, 0),
        (packs + 8, 1 << 62),
        (members, 4),
        (members, u64::MAX),
    ] {
        assert_ne!(forged(at, value), whole);
        // A new file, as the old one may be open.
        fs::remove_file(&path).unwrap();
        fs::write(&path, forged(at, value)).unwrap();
        assert!(!make().found, "{at} {value}: it is made anew");
        assert_eq!(fs::read(&path).unwrap(), whole);
    }
}
