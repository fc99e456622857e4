//! Detects the format of a text by its first bytes, and tables also by the file's name. Formats that are not read get one
//! clear error instead of one per line.

use std::path::Path;

/// Name endings of data files in a folder; each may be followed by `.gz`, `.zst` or `.zstd`.
pub(super) const ENDINGS: [&str; 7] = ["jsonl", "ndjson", "json", "csv", "tsv", "parquet", "jsonlines"];
const COMPRESSED: [&str; 3] = ["gz", "zst", "zstd"];

/// How a text is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TextFormat {
    /// A JSON object on each line.
    Lines,
    /// One JSON array of objects.
    Array,
    /// Records with this delimiter, after one of column names.
    Table { delimiter: u8 },
}

/// A format that is not read, and the remedy.
pub(super) struct Foreign {
    pub(super) what: String,
    pub(super) remedy: String,
}

/// Magic bytes of binary files, their format and the remedy.
const MAGIC: [(&[u8], &str, &str); 10] = [
    // Read in place, so only where a file is compressed.
    (b"PAR1", "a Parquet file", "decompress it: Parquet compresses its columns itself"),
    (
        b"ARROW1",
        "an Arrow file",
        "convert it to JSONL or Parquet, e.g. with to_json or to_parquet of `datasets`",
    ),
    (b"\x1F\x8B", "compressed twice, with gzip inside", "decompress it once"),
    (b"\x28\xB5\x2F\xFD", "compressed twice, with Zstandard inside", "decompress it once"),
    (b"\xFD7zXZ\0", "compressed with xz", "decompress it with unxz"),
    (b"BZh", "compressed with bzip2", "decompress it with bunzip2"),
    (b"\x04\x22\x4D\x18", "compressed with LZ4", "decompress it with unlz4"),
    (b"PK\x03\x04", "a ZIP archive", "unpack it with unzip"),
    (b"\xFF\xFE\0\0", "UTF-32 text", "convert it to UTF-8, e.g. with iconv -f UTF-32 -t UTF-8"),
    (b"\0\0\xFE\xFF", "UTF-32 text", "convert it to UTF-8, e.g. with iconv -f UTF-32 -t UTF-8"),
];

/// Detects the format of a text. `beginning` has no byte order mark of UTF-8.
pub(super) fn detect(path: &Path, beginning: &[u8]) -> Result<TextFormat, Foreign> {
    if let Some((_, what, remedy)) = MAGIC.iter().find(|(magic, ..)| beginning.starts_with(magic)) {
        return Err(Foreign { what: (*what).to_owned(), remedy: (*remedy).to_owned() });
    }
    if beginning.get(TAR.0..).is_some_and(|header| header.starts_with(TAR.1)) {
        return Err(Foreign { what: "a tar archive".to_owned(), remedy: "unpack it with tar -x".to_owned() });
    }
    if let Some(encoding) = utf_16(beginning) {
        let remedy = format!("convert it to UTF-8, e.g. with iconv -f {encoding} -t UTF-8");
        return Err(Foreign { what: "UTF-16 text".to_owned(), remedy });
    }
    let text = beginning.trim_ascii_start();
    if is_array(text) {
        return Ok(TextFormat::Array);
    }
    Ok(delimiter(path, text).map_or(TextFormat::Lines, |delimiter| TextFormat::Table { delimiter }))
}

/// Offset and value of the magic bytes of tar archives.
const TAR: (usize, &[u8]) = (257, b"ustar");

/// By its byte order mark or, without one, by ASCII with two bytes per character.
fn utf_16(beginning: &[u8]) -> Option<&'static str> {
    match beginning {
        [0xFF, 0xFE, ..] | [0xFE, 0xFF, ..] => Some("UTF-16"),
        [first, 0, second, 0, ..] if *first != 0 && *second != 0 => Some("UTF-16LE"),
        [0, first, 0, second, ..] if *first != 0 && *second != 0 => Some("UTF-16BE"),
        _ => None,
    }
}

/// An array of objects, on one or several lines. A line with another kind of list is an invalid row.
fn is_array(text: &[u8]) -> bool {
    let Some(inside) = text.strip_prefix(b"[") else { return false };
    matches!(inside.trim_ascii_start().first(), None | Some(b'{' | b']'))
}

/// The delimiter if the first lines are a table: column names, then as many fields.
fn delimiter(path: &Path, text: &[u8]) -> Option<u8> {
    if matches!(text.first(), None | Some(b'{' | b'[')) {
        return None;
    }
    let mut lines = text.split(|byte| *byte == b'\n');
    let (first, second) = (lines.next()?, lines.next().unwrap_or_default());
    let is_row = second.trim_ascii_start().starts_with(b"{");
    let is_table = |delimiter: u8| {
        let fields: Vec<&[u8]> = first.split(|byte| *byte == delimiter).map(<[u8]>::trim_ascii).collect();
        let below = second.split(|byte| *byte == delimiter).count();
        !is_row && fields.len() > 1 && below >= fields.len() && fields.iter().all(|field| is_name(field))
    };
    match extension(path).as_deref() {
        Some("tsv") => Some(b'\t'),
        // Spreadsheets write semicolons where commas are decimal points.
        Some("csv") => {
            Some([b',', b'\t', b';'].into_iter().find(|delimiter| first.contains(delimiter)).unwrap_or(b','))
        }
        _ => [b'\t', b',', b';'].into_iter().find(|delimiter| is_table(*delimiter)),
    }
}

/// A column name, quoted or not.
fn is_name(field: &[u8]) -> bool {
    let bare = field.strip_prefix(b"\"").and_then(|field| field.strip_suffix(b"\"")).unwrap_or(field);
    let fits = |byte: &u8| byte.is_ascii_alphanumeric() || b"_-. ".contains(byte);
    bare.first().is_some_and(u8::is_ascii_alphabetic) && bare.iter().all(fits)
}

/// The lower-case extension of a file, without that of its compression.
pub(super) fn extension(path: &Path) -> Option<String> {
    let lower = |path: &Path| path.extension()?.to_str().map(str::to_ascii_lowercase);
    match lower(path) {
        Some(extension) if COMPRESSED.contains(&extension.as_str()) => lower(Path::new(path.file_stem()?)),
        other => other,
    }
}
