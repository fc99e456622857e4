//! Damage to files: to bytes anywhere, and to the pieces that a text of JSON is made of.

use std::ops::Range;

use crate::chance::Chance;

/// Numbers that readers forget to bound, as text.
const NUMBERS: [&str; 26] = [
    "0",
    "-1",
    "1",
    "2",
    "3",
    "1.5",
    "-0.0",
    "1e308",
    "-1e308",
    "1e999",
    "1e-400",
    "NaN",
    "Infinity",
    "-Infinity",
    "2147483648",
    "4294967295",
    "4294967296",
    "4611686018427387904",
    "9223372036854775807",
    "9223372036854775808",
    "18446744073709551615",
    "18446744073709551616",
    "-9223372036854775808",
    "99999999999999999999999999999999",
    "1073741824",
    "65536",
];
/// The same in binary.
const WORDS: [u64; 14] = [
    0,
    1,
    2,
    0x7f,
    0xff,
    0xffff,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_ffff,
    1 << 33,
    1 << 62,
    i64::MAX as u64,
    1 << 63,
    u64::MAX,
];
/// Values of another kind.
const VALUES: [&str; 10] =
    ["null", "true", "false", "[]", "{}", "\"\"", "[null]", "{\"\":null}", "[[]]", "[0]"];
/// Texts that are no names.
const TEXTS: [&str; 12] = [
    "\"\"",
    "\"\\u0000\"",
    "\"\\ud800\"",
    "\"../../../etc/passwd\"",
    "\"/\"",
    "\"NaN\"",
    "\"-1\"",
    "\"\u{10ffff}\u{202e}\"",
    "\"\\\\\"",
    "\"%s%n\"",
    "\"18446744073709551616\"",
    "\"(?:a+)+$\"",
];
const DEPTHS: [usize; 6] = [2, 127, 128, 129, 1_000, 100_000];

/// Whole numbers that a strict reader takes, too.
const WHOLE: [&str; 12] = [
    "0",
    "1",
    "2",
    "7",
    "65536",
    "1073741824",
    "4294967296",
    "1099511627776",
    "4611686018427387904",
    "9223372036854775807",
    "9223372036854775808",
    "18446744073709551615",
];

/// One to three pieces of damage to a text of JSON, or of lines of it. One is the most likely: where there are several, the
/// first that is refused hides the others.
pub(crate) fn text(bytes: &[u8], chance: &mut Chance) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    for _ in 0..chance.one_of(&[1, 1, 1, 2, 3]) {
        bytes = match chance.below(12) {
            0..=2 => at_piece(&bytes, chance, is_number, |chance, _| chance.one_of(&WHOLE).into()),
            3 | 4 => at_piece(&bytes, chance, is_number, |chance, _| chance.one_of(&NUMBERS).into()),
            5 => at_piece(&bytes, chance, |piece| !is_mark(piece), |chance, _| chance.one_of(&VALUES).into()),
            6 => at_piece(&bytes, chance, is_text, |chance, _| changed_text(chance)),
            7 => at_piece(
                &bytes,
                chance,
                |piece| !is_mark(piece),
                |chance, piece| {
                    let depth = chance.one_of(&DEPTHS);
                    let (open, close) = chance.one_of(&[("[", "]"), ("{\"a\":", "}")]);
                    [open.repeat(depth).as_bytes(), piece, close.repeat(depth).as_bytes()].concat()
                },
            ),
            8 => over_piece(&bytes, chance),
            9 => stretch(&bytes, chance),
            _ => binary_once(&bytes, chance),
        };
    }
    bytes
}

/// One to three pieces of damage to any bytes.
pub(crate) fn binary(bytes: &[u8], chance: &mut Chance) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    for _ in 0..chance.one_of(&[1, 1, 1, 2, 3]) {
        bytes = binary_once(&bytes, chance);
    }
    bytes
}

fn binary_once(bytes: &[u8], chance: &mut Chance) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    if bytes.is_empty() {
        return vec![chance.next() as u8];
    }
    let at = chance.below(bytes.len());
    let end = (at + 1 + chance.below(64)).min(bytes.len());
    match chance.below(8) {
        0 | 1 => {
            for _ in 0..=chance.below(8) {
                let at = chance.below(bytes.len());
                bytes[at] ^= 1 << chance.below(8);
            }
        }
        2 => bytes.truncate(at),
        3 => {
            // A number of four or eight bytes, where such numbers lie.
            let (size, value) = (chance.one_of(&[4, 8]), chance.one_of(&WORDS).to_le_bytes());
            let at = at / size * size;
            let room = bytes.len().min(at + size) - at;
            bytes[at..at + room].copy_from_slice(&value[..room]);
        }
        4 => {
            let piece = bytes[at..end].to_vec();
            bytes.splice(at..at, piece.repeat(1 + chance.below(4)));
        }
        5 => drop(bytes.drain(at..end)),
        6 => {
            // The largest number of variable length, as Thrift writes it.
            let room = (end - at).min(10);
            bytes[at..at + room].fill(0xff);
            bytes[at + room - 1] = 0x7f;
        }
        _ => {
            let value = chance.next() as u8;
            bytes[at..end].fill(value);
        }
    }
    bytes
}

/// A number of eight bytes at a multiple of eight becomes one that readers forget to bound.
pub(crate) fn word(bytes: &mut [u8], among: Range<usize>, chance: &mut Chance) {
    let words = (among.end - among.start) / 8;
    let at = among.start + 8 * chance.below(words);
    let old = u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
    let new = match chance.below(4) {
        0 => old.wrapping_add(1),
        1 => old.wrapping_sub(1),
        _ => chance.one_of(&WORDS),
    };
    bytes[at..at + 8].copy_from_slice(&new.to_le_bytes());
}

fn changed_text(chance: &mut Chance) -> Vec<u8> {
    match chance.below(8) {
        0 => format!("\"{}\"", "x".repeat(1 << chance.below(17))).into_bytes(),
        _ => chance.one_of(&TEXTS).into(),
    }
}

fn is_mark(piece: &[u8]) -> bool {
    piece.len() == 1 && b"{}[],:".contains(&piece[0])
}

fn is_number(piece: &[u8]) -> bool {
    piece[0] == b'-' || piece[0].is_ascii_digit()
}

fn is_text(piece: &[u8]) -> bool {
    piece[0] == b'"'
}

/// Where the pieces of a text of JSON lie: marks, texts, numbers and words.
fn pieces(bytes: &[u8]) -> Vec<Range<usize>> {
    let mut pieces = Vec::new();
    let mut at = 0;
    while at < bytes.len() {
        let start = at;
        match bytes[at] {
            byte if byte.is_ascii_whitespace() => {
                at += 1;
                continue;
            }
            b'{' | b'}' | b'[' | b']' | b',' | b':' => at += 1,
            b'"' => {
                at += 1;
                while at < bytes.len() && bytes[at] != b'"' {
                    at += if bytes[at] == b'\\' { 2 } else { 1 };
                }
                at = (at + 1).min(bytes.len());
            }
            _ => {
                let ends = |byte: &u8| byte.is_ascii_whitespace() || b"{}[],:\"".contains(byte);
                at = bytes[at..].iter().position(ends).map_or(bytes.len(), |length| at + length);
                at = at.max(start + 1);
            }
        }
        pieces.push(start..at);
    }
    pieces
}

/// Changes one of the pieces that `is_meant`; any byte where there is none.
fn at_piece(
    bytes: &[u8],
    chance: &mut Chance,
    is_meant: impl Fn(&[u8]) -> bool,
    replace: impl FnOnce(&mut Chance, &[u8]) -> Vec<u8>,
) -> Vec<u8> {
    let mut meant = pieces(bytes);
    meant.retain(|piece| is_meant(&bytes[piece.clone()]));
    if meant.is_empty() {
        return binary_once(bytes, chance);
    }
    let piece = meant[chance.below(meant.len())].clone();
    let new = replace(chance, &bytes[piece.clone()]);
    [&bytes[..piece.start], &new, &bytes[piece.end..]].concat()
}

/// Puts one piece in the place of another.
fn over_piece(bytes: &[u8], chance: &mut Chance) -> Vec<u8> {
    let all = pieces(bytes);
    if all.is_empty() {
        return binary_once(bytes, chance);
    }
    let from = all[chance.below(all.len())].clone();
    at_piece(bytes, chance, |_| true, |_, _| bytes[from].to_vec())
}

/// Writes some neighbouring pieces several times, or not at all.
fn stretch(bytes: &[u8], chance: &mut Chance) -> Vec<u8> {
    let all = pieces(bytes);
    if all.is_empty() {
        return binary_once(bytes, chance);
    }
    let first = chance.below(all.len());
    let last = (first + chance.below(24)).min(all.len() - 1);
    let span = all[first].start..all[last].end;
    let times = chance.one_of(&[0, 0, 2, 3, 50]);
    [&bytes[..span.start], &bytes[span.clone()].repeat(times), &bytes[span.end..]].concat()
}
