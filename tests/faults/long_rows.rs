//! Rows far longer than any that is trained, in every file format and row format: dropped and counted, or refused by name,
//! within a bound of memory.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use parquet::basic::Compression;
use parquet::data_type::{ByteArray, ByteArrayType, Int32Type};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::{SerializedFileWriter, SerializedRowGroupWriter};
use parquet::schema::parser::parse_message_type;
use serde_json::{Value, json};

use super::cases;
use super::chance::Chance;
use super::inject::{Ended, watched};

const AUDIT: u32 = 21;
const FILES: [&str; 8] = [
    "rows.jsonl",
    "rows.jsonl.gz",
    "rows.json",
    "rows.json.gz",
    "rows.csv",
    "rows.csv.gz",
    "rows.tsv",
    "rows.parquet",
];
const ROWS: [&str; 5] = ["text", "prompt and completion", "question and answer", "messages", "input_ids"];

/// RSS of the command without the long row, about.
const COMMAND: u64 = 100 << 20;
/// The stated bound of what a row takes: docs/data.md.
const ROW: u64 = 2 << 30;

/// RSS that a row of so many bytes of text may take: nothing per token, as it is not tokenised, or the stated bound.
fn most(kind: &str, bytes: u64) -> u64 {
    // Ids are parsed, two bytes of text each.
    let of_row = if kind == "input_ids" { 100 * bytes } else { 16 * bytes };
    COMMAND + of_row.min(ROW)
}

/// A row of the kind, with about so many bytes of text.
fn row(kind: &str, bytes: usize) -> Value {
    let text = "words ".repeat(bytes.div_ceil(6));
    match kind {
        "text" => json!({ "text": text }),
        "prompt and completion" => json!({"prompt": text, "completion": "Yes"}),
        "question and answer" => json!({"question": "Why?", "answer": text}),
        "messages" => json!({"messages": [
            {"role": "user", "content": text},
            {"role": "assistant", "content": "Yes"},
        ]}),
        _ => json!({"input_ids": vec![7; bytes.div_ceil(2)]}),
    }
}

/// Writes rows of one kind to a file of a format.
fn write(path: &Path, kind: &str, rows: &[Value]) {
    let name = path.file_name().unwrap().to_string_lossy().into_owned();
    let plain = path.with_file_name(name.trim_end_matches(".gz"));
    let delimiter = if name.contains(".tsv") { "\t" } else { "," };
    let cell = |value: &Value| {
        let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        format!("\"{}\"", text.replace('"', "\"\""))
    };
    let joined = |separator: &str| rows.iter().map(Value::to_string).collect::<Vec<_>>().join(separator);
    match name.split('.').nth(1) {
        Some("jsonl") => fs::write(&plain, joined("\n")).unwrap(),
        Some("json") => fs::write(&plain, format!("[{}]", joined(",\n"))).unwrap(),
        Some("parquet") => write_parquet(&plain, kind, rows),
        _ => {
            let fields = |row: &Value| row.as_object().unwrap().clone();
            let header = fields(&rows[0]).keys().cloned().collect::<Vec<_>>().join(delimiter);
            let record =
                |row: &Value| fields(row).values().map(cell).collect::<Vec<_>>().join(delimiter) + "\n";
            fs::write(&plain, header + "\n" + &rows.iter().map(record).collect::<String>()).unwrap();
        }
    }
    if plain != path {
        assert!(Command::new("gzip").args(["-1", "-f"]).arg(&plain).status().unwrap().success());
    }
}

fn texts(group: &mut SerializedRowGroupWriter<'_, File>, values: &[&str], levels: Option<[&[i16]; 2]>) {
    let values: Vec<ByteArray> = values.iter().map(|text| ByteArray::from(*text)).collect();
    let [definition, repetition] = levels.map_or([None; 2], |levels| levels.map(Some));
    let mut column = group.next_column().unwrap().unwrap();
    column.typed::<ByteArrayType>().write_batch(&values, definition, repetition).unwrap();
    column.close().unwrap();
}

fn write_parquet(path: &Path, kind: &str, rows: &[Value]) {
    let first = rows[0].as_object().unwrap();
    let columns: Vec<&str> = first.keys().map(String::as_str).collect();
    let schema = match kind {
        "messages" => "required group messages (LIST) { repeated group list { required group element {
            required binary role (UTF8); required binary content (UTF8); } } }"
            .to_owned(),
        "input_ids" => {
            "required group input_ids (LIST) { repeated group list { required int32 element; } }".to_owned()
        }
        _ => format!("required binary {} (UTF8);", columns.join(" (UTF8); required binary ")),
    };
    let schema = Arc::new(parse_message_type(&format!("message schema {{ {schema} }}")).unwrap());
    let properties = Arc::new(WriterProperties::builder().set_compression(Compression::SNAPPY).build());
    let mut writer = SerializedFileWriter::new(File::create(path).unwrap(), schema, properties).unwrap();
    let mut group = writer.next_row_group().unwrap();
    // Lists have levels: the first entry of a row begins it.
    let lists: Vec<&Vec<Value>> = rows.iter().filter_map(|row| row[columns[0]].as_array()).collect();
    let entries = || lists.iter().flat_map(|list| list.iter());
    let repetition: Vec<i16> =
        lists.iter().flat_map(|list| (0..list.len()).map(|at| i16::from(at > 0))).collect();
    let definition = vec![1; repetition.len()];
    match kind {
        "messages" => {
            for key in ["role", "content"] {
                let values: Vec<&str> = entries().filter_map(|entry| entry[key].as_str()).collect();
                texts(&mut group, &values, Some([&definition, &repetition]));
            }
        }
        "input_ids" => {
            let ids: Vec<i32> = entries().filter_map(|id| Some(id.as_i64()? as i32)).collect();
            let mut column = group.next_column().unwrap().unwrap();
            column.typed::<Int32Type>().write_batch(&ids, Some(&definition), Some(&repetition)).unwrap();
            column.close().unwrap();
        }
        _ => {
            for name in columns {
                let values: Vec<&str> = rows.iter().filter_map(|row| row[name].as_str()).collect();
                texts(&mut group, &values, None);
            }
        }
    }
    group.close().unwrap();
    writer.close().unwrap();
}

/// Bytes of memory that a process had at most.
fn peak(process: u32) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    Some(line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()? << 10)
}

/// `zeroth train --dry-run` on a file, killed beyond a bound of memory; and its peak.
fn trained(folder: &Path, data: &Path, most: u64) -> (Ended, u64) {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/numbers/tiny-qwen3");
    let mut command = Command::new(env!("CARGO_BIN_EXE_zeroth"));
    command.args([
        "train",
        "--dry-run",
        "--device",
        "cpu",
        "--max-length",
        "64",
        "--max-steps",
        "1",
        "--model",
    ]);
    command.arg(model).arg("--data").arg(data).arg("--output").arg(folder.join("run"));
    let mut highest = 0;
    let ended = watched(&mut command, &folder.join("cache"), |process| {
        highest = peak(process).unwrap_or(0).max(highest);
        highest <= most
    });
    (ended, highest)
}

/// What a case is: its file, kind of rows, bytes of the long row, and where it stands.
fn case(number: u32, is_full: bool) -> (&'static str, &'static str, usize, usize) {
    let mut chance = Chance::of(AUDIT, number);
    let file = FILES[number as usize % FILES.len()];
    let kind = ROWS[(number as usize + number as usize / FILES.len()) % ROWS.len()];
    // Rows of more than 64 MiB are refused, and so are lists of more than 8 MiB of text.
    let highest = if is_full { 25 } else { 20 };
    let power = 17 + chance.below(highest - 17 + 1);
    let bytes = (1 << power) + chance.below(1 << power);
    (file, kind, bytes.min(80 << 20), chance.below(3))
}

#[test]
fn long_rows_are_dropped_or_refused() {
    let (few, full) = (10, 160);
    let count = cases(few, full);
    let folder = tempfile::tempdir().unwrap();
    let (mut faults, mut ends) = (Vec::new(), BTreeMap::<&str, u32>::new());
    let mut highest = 0;
    for number in 0..count {
        let (file, kind, bytes, at) = case(number, count == full);
        let mut rows = vec![row(kind, 12), row(kind, 18)];
        rows.insert(at, row(kind, bytes));
        let path: PathBuf = folder.path().join(file);
        write(&path, kind, &rows);
        drop(rows);
        let most = most(kind, bytes as u64);
        let (ended, peak) = trained(folder.path(), &path, most);
        highest = highest.max(peak);
        let is_dropped = ended.code == 0
            && ended.said.contains("data: 2 samples")
            && ended.said.contains("note: 1 row was dropped: more than 64 tokens (--max-length)");
        let place = format!("{}: ", path.display());
        let refused = ["is longer than", "the row has more than", "was stopped: it took more than"]
            .into_iter()
            .find(|words| ended.code == 2 && ended.said.contains(&place) && ended.said.contains(words));
        let what = match refused {
            _ if is_dropped => Some("dropped"),
            // Only beyond what is parsed and rendered.
            refused if bytes > 8 << 20 => refused,
            _ => None,
        };
        match what {
            Some(what) if peak <= most => *ends.entry(what).or_default() += 1,
            _ => faults.push(format!(
                "case {number}, {bytes} bytes of {kind} in {file}: exit code {}, {} MiB of {}: {}",
                ended.code,
                peak >> 20,
                most >> 20,
                ended.said
            )),
        }
    }
    println!("{count} long rows, at most {} MiB, {} faults: {ends:?}", highest >> 20, faults.len());
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}
