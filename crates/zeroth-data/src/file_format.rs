//! Data files that are neither JSONL nor Parquet, told by how they begin: once, and not line by line.

use std::path::Path;

/// Files that are no text, by how they begin; what they are, and what to do.
const MAGIC: [(&[u8], &str, &str); 9] = [
    (b"ARROW1", "an Arrow file", "write JSONL or Parquet, as with to_json or to_parquet of `datasets`"),
    (b"\x1F\x8B", "compressed with gzip", "unpack it with gunzip"),
    (b"\x28\xB5\x2F\xFD", "compressed with Zstandard", "unpack it with unzstd"),
    (b"\xFD7zXZ\0", "compressed with xz", "unpack it with unxz"),
    (b"BZh", "compressed with bzip2", "unpack it with bunzip2"),
    (b"\x04\x22\x4D\x18", "compressed with LZ4", "unpack it with unlz4"),
    (b"PK\x03\x04", "a ZIP archive", "unpack it with unzip"),
    (b"\xFF\xFE\0\0", "a text in UTF-32", "write it as UTF-8, as with iconv -f UTF-32 -t UTF-8"),
    (b"\0\0\xFE\xFF", "a text in UTF-32", "write it as UTF-8, as with iconv -f UTF-32 -t UTF-8"),
];

/// What a file is whose beginning no JSONL file has, and what to do with it.
pub(super) fn foreign(path: &Path, beginning: &[u8]) -> Option<(String, String)> {
    let known = MAGIC.iter().find(|(magic, ..)| beginning.starts_with(magic));
    if let Some((_, what, remedy)) = known {
        return Some(((*what).to_owned(), (*remedy).to_owned()));
    }
    if let Some(encoding) = utf_16(beginning) {
        let remedy = format!("write it as UTF-8, as with iconv -f {encoding} -t UTF-8");
        return Some(("a text in UTF-16".to_owned(), remedy));
    }
    let text = beginning.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(beginning).trim_ascii_start();
    if is_array(text) {
        let remedy = "write one object a line (JSONL), as with jq -c '.[]'";
        return Some(("one JSON array".to_owned(), remedy.to_owned()));
    }
    let table = delimited(path, text)?;
    let separator = if table == "TSV" { ", sep='\\t'" } else { "" };
    let remedy = format!(
        "write JSONL, as with pandas.read_csv('{}'{separator}).to_json('rows.jsonl', orient='records', lines=True)",
        path.display()
    );
    Some((format!("a table ({table}), which is not read yet"), remedy))
}

/// By its byte order mark, or, without one, by ASCII that takes two bytes a character.
fn utf_16(beginning: &[u8]) -> Option<&'static str> {
    match beginning {
        [0xFF, 0xFE, ..] | [0xFE, 0xFF, ..] => Some("UTF-16"),
        [first, 0, second, 0, ..] if *first != 0 && *second != 0 => Some("UTF-16LE"),
        [0, first, 0, second, ..] if *first != 0 && *second != 0 => Some("UTF-16BE"),
        _ => None,
    }
}

/// An array of objects, on one line or on many. A line that is a list of something else is a row that is wrong.
fn is_array(text: &[u8]) -> bool {
    let Some(inside) = text.strip_prefix(b"[") else { return false };
    matches!(inside.trim_ascii_start().first(), None | Some(b'{'))
}

/// Whether the first lines are those of a table: names, and below them as many fields.
fn delimited(path: &Path, text: &[u8]) -> Option<&'static str> {
    if matches!(text.first(), None | Some(b'{' | b'[')) {
        return None;
    }
    let named = |name: &str| path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case(name));
    let mut lines = text.split(|byte| *byte == b'\n');
    let (first, second) = (lines.next()?, lines.next().unwrap_or_default());
    let is_row = second.trim_ascii_start().starts_with(b"{");
    let is_table = |separator: u8| {
        let fields: Vec<&[u8]> = first.split(|byte| *byte == separator).map(<[u8]>::trim_ascii).collect();
        let below = second.split(|byte| *byte == separator).count();
        !is_row && fields.len() > 1 && below >= fields.len() && fields.iter().all(|field| is_name(field))
    };
    if named("tsv") || is_table(b'\t') {
        Some("TSV")
    } else if named("csv") || is_table(b',') || is_table(b';') {
        Some("CSV")
    } else {
        None
    }
}

/// A column's name, in quotes or not.
fn is_name(field: &[u8]) -> bool {
    let bare = field.strip_prefix(b"\"").and_then(|field| field.strip_suffix(b"\"")).unwrap_or(field);
    let fits = |byte: &u8| byte.is_ascii_alphanumeric() || b"_-. ".contains(byte);
    bare.first().is_some_and(u8::is_ascii_alphabetic) && bare.iter().all(fits)
}
