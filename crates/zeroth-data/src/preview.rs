//! The text of `zeroth data preview`: rows with trained tokens marked, a histogram of lengths, and problems by row
//! number.

use std::ops::Range;
use std::path::PathBuf;

use zeroth_base::{counted, grouped};

use super::pairs::{DecoderStart, Pairs};
use super::survey::{CappedList, FirstRow, LengthBucket, RowLocation, Survey};
use super::{Encoded, IGNORED, RowNumber};

/// Markers around trained tokens when colours are off.
pub const TRAINED_MARKERS: [&str; 2] = ["«", "»"];
/// Tokens shown per row; longer rows show their beginning and end.
const SHOWN: usize = 2000;
/// Width of the longest bar.
const BAR: u64 = 40;

/// The omitted middle of a row that is too long to show.
pub fn omitted_range(tokens: usize) -> Option<Range<usize>> {
    (tokens > SHOWN).then(|| SHOWN / 2..tokens - SHOWN / 2)
}

/// Formats a survey. Trained tokens are wrapped in `marks`; `text` decodes adjacent tokens.
pub fn preview(
    survey: &Survey,
    files: &[PathBuf],
    max_length: u64,
    marks: [&str; 2],
    text: &dyn Fn(&[i32]) -> String,
) -> String {
    let mut out = String::new();
    for first in &survey.first {
        let FirstRow { place, row } = first;
        if let Some(Pairs { start, .. }) = survey.pairs {
            out += &format!("{}: {}\n", named(files, place), pair(row, start, marks, text));
            continue;
        }
        let trained = super::index_builder::trained_tokens(&row.labels);
        let tokens = counted(row.ids.len() as u64, "token");
        out += &format!("{}: {tokens}, {} trained\n", named(files, place), grouped(trained));
        let part = |range: Range<usize>| marked(&row.ids, &row.labels, range, marks, text);
        out += &shortened(row.ids.len(), part);
        out += "\n\n";
    }
    out += &match survey.pairs {
        None => lengths("tokens", &survey.lengths, max_length, "too long"),
        Some(Pairs { limits, .. }) => [
            lengths("source tokens", &survey.lengths, limits.source, "truncated"),
            lengths("target tokens", &survey.target_lengths, limits.target, "truncated"),
        ]
        .concat(),
    };
    let totals = &survey.totals;
    let percent = 100.0 * totals.trained_tokens as f64 / totals.tokens.max(1) as f64;
    out += &format!(
        "{} read, {} kept: {}, {} of them trained ({percent:.1} %)\n",
        counted(survey.rows, "row"),
        grouped(totals.samples),
        counted(totals.tokens, "token"),
        grouped(totals.trained_tokens),
    );
    if survey.problems.count > 0 {
        out += &format!("\n{} wrong:\n", counted(survey.problems.count, "row"));
        for problem in &survey.problems.first {
            out += &format!("  {}: {}\n", named(files, &problem.place), shown(&problem.message));
        }
        out += &more(&survey.problems);
    }
    let limit = format!("more than {} (--max-length)", counted(max_length, "token"));
    for (listed, what) in [(&survey.too_long, &limit[..]), (&survey.untrained, "no trained token")] {
        if listed.count > 0 {
            out += &format!("\n{} with {what}:\n", counted(listed.count, "row"));
            out += &numbers(files, &listed.first);
            out += &more(listed);
        }
    }
    out
}

/// The tokens of a row, or its beginning and end.
fn shortened(tokens: usize, part: impl Fn(Range<usize>) -> String) -> String {
    match omitted_range(tokens) {
        None => part(0..tokens),
        Some(gap) => {
            let omitted = counted(gap.len() as u64, "token");
            [part(0..gap.start), format!("\n  […{omitted} omitted…]\n"), part(gap.end..tokens)].concat()
        }
    }
}

/// The sequences of a pair: its source, the decoder's inputs and the labels, of which the trained are marked.
fn pair(row: &Encoded, start: DecoderStart, marks: [&str; 2], text: &dyn Fn(&[i32]) -> String) -> String {
    let cut = |stream: usize| match row.cut[stream] {
        0 => String::new(),
        more => format!(" ({} more truncated)", grouped(more as u64)),
    };
    let trained = grouped(super::index_builder::trained_targets(&row.labels));
    let mut out = format!(
        "{}{}, {}{}, {trained} trained\n",
        counted(row.ids.len() as u64, "source token"),
        cut(0),
        counted(row.labels.len() as u64, "label"),
        cut(1)
    );
    let plain = |ids: &[i32]| format!("  {}", shown(&text(ids)).replace('\n', "\n  "));
    let inputs = start.inputs(&row.labels);
    for (name, ids) in [("source", &row.ids), ("decoder input", &inputs)] {
        out += &format!("  {name}:\n{}\n", shortened(ids.len(), |range| plain(&ids[range])));
    }
    // Untrained labels have no token.
    let labels: Vec<i32> = row.labels.iter().map(|label| (*label).max(0)).collect();
    let part = |range: Range<usize>| {
        let runs = row.labels[range.clone()].chunk_by(|one, next| (*one < 0) == (*next < 0));
        let mut at = range.start;
        let piece = |run: &[i32]| {
            let ids = &labels[at..at + run.len()];
            at += run.len();
            if run[0] < 0 {
                format!("[{} × {IGNORED}]", run.len())
            } else {
                in_marks(&shown(&text(ids)), marks)
            }
        };
        format!("  {}", runs.map(piece).collect::<String>().replace('\n', "\n  "))
    };
    out + &format!("  labels:\n{}\n", shortened(labels.len(), part))
}

/// Wraps each line in marks: terminals and pagers reset colours at line ends.
fn in_marks(text: &str, marks: [&str; 2]) -> String {
    let lines: Vec<String> = text.split('\n').map(|line| format!("{}{line}{}", marks[0], marks[1])).collect();
    lines.join("\n")
}

fn named(files: &[PathBuf], place: &RowLocation) -> String {
    format!("{}: {}", files[place.file].display(), place.at)
}

fn more<T>(listed: &CappedList<T>) -> String {
    match listed.count - listed.first.len() as u64 {
        0 => String::new(),
        rest => format!("  and {} more\n", grouped(rest)),
    }
}

/// Row numbers, one line per file.
fn numbers(files: &[PathBuf], places: &[RowLocation]) -> String {
    let of_file = |places: &[RowLocation]| {
        let number = |place: &RowLocation| match place.at {
            RowNumber::Line(number) | RowNumber::Row(number) | RowNumber::RowAtLine { row: number, .. } => {
                number.to_string()
            }
        };
        let unit = if matches!(places[0].at, RowNumber::Line(_)) { "line" } else { "row" };
        let plural = if places.len() == 1 { "" } else { "s" };
        let numbers: Vec<String> = places.iter().map(number).collect();
        format!("  {}: {unit}{plural} {}\n", files[places[0].file].display(), numbers.join(", "))
    };
    places.chunk_by(|one, next| one.file == next.file).map(of_file).collect()
}

/// Formats a part of a row, indented, with trained tokens marked. The first token is never trained, as nothing
/// precedes it.
fn marked(
    ids: &[i32],
    labels: &[i32],
    part: Range<usize>,
    marks: [&str; 2],
    text: &dyn Fn(&[i32]) -> String,
) -> String {
    let trained: Vec<bool> = part
        .clone()
        .map(|place| place > 0 && labels.get(place).is_some_and(|&label| label != IGNORED))
        .collect();
    let mut out = String::new();
    let mut start = part.start;
    // Runs instead of single tokens, as a character may span several.
    for run in trained.chunk_by(|one, next| one == next) {
        let piece = shown(&text(&ids[start..start + run.len()]));
        start += run.len();
        if run[0] {
            out += &in_marks(&piece, marks);
        } else {
            out += &piece;
        }
    }
    format!("  {}", out.replace('\n', "\n  "))
}

/// Escapes control characters, so that text cannot control the terminal; line ends are shown and kept.
fn shown(text: &str) -> String {
    let one = |character: char| match character {
        '\n' => "⏎\n".to_owned(),
        '\t' => "\t".to_owned(),
        other if other.is_control() => other.escape_default().to_string(),
        other => other.to_string(),
    };
    text.chars().map(one).collect()
}

fn lengths(of: &str, buckets: &[LengthBucket], max_length: u64, beyond: &str) -> String {
    let (Some(most), Some(last)) = (buckets.iter().map(|bucket| bucket.rows).max(), buckets.last()) else {
        return String::new();
    };
    let digits = grouped(last.to).len();
    let mut out = format!("Rows by their {of}:\n");
    for bucket in buckets {
        // Non-empty buckets always have a bar.
        let bar = "█".repeat((bucket.rows * BAR).div_ceil(most) as usize);
        let note = if bucket.from > max_length { format!(", {beyond}") } else { String::new() };
        let rows =
            if bucket.rows == 0 { String::new() } else { format!("{bar} {}{note}", grouped(bucket.rows)) };
        let line = format!("  {:>digits$} to {:>digits$} │{rows}", grouped(bucket.from), grouped(bucket.to));
        out += line.trim_end();
        out.push('\n');
    }
    out + "\n"
}

#[cfg(test)]
mod tests {
    use super::super::{Encoded, InvalidRow, Totals};
    use super::*;

    fn text(ids: &[i32]) -> String {
        ids.iter().map(|&id| char::from(id as u8)).collect()
    }

    fn survey() -> Survey {
        let place = |file, at| RowLocation { file, at };
        let ids: Vec<i32> = "Hi?\nOk\x1b".bytes().map(i32::from).collect();
        let labels = [72, -100, -100, 10, 79, 107, -100].to_vec();
        let bucket = |from, to, rows| LengthBucket { from, to, rows, tokens: rows, trained_tokens: 0 };
        Survey {
            rows: 1204,
            totals: Totals { samples: 1200, tokens: 30_000, trained_tokens: 10_000, ..Totals::default() },
            target_lengths: Vec::new(),
            pairs: None,
            lengths: vec![bucket(1, 50, 1000), bucket(51, 100, 0), bucket(101, 150, 1), bucket(151, 9000, 3)],
            first: vec![FirstRow {
                place: place(0, RowNumber::Line(1)),
                row: Encoded { ids, labels, ..Encoded::default() },
            }],
            problems: CappedList {
                count: 1,
                first: vec![InvalidRow { place: place(1, RowNumber::Row(7)), message: "no".to_owned() }],
            },
            too_long: CappedList {
                count: 5,
                first: vec![
                    place(0, RowNumber::Line(4)),
                    place(0, RowNumber::Line(9)),
                    place(1, RowNumber::Row(2)),
                ],
            },
            untrained: CappedList { count: 0, first: Vec::new() },
        }
    }

    #[test]
    fn rows_lengths_and_problems_are_shown() {
        let files = ["a.jsonl", "b.parquet"].map(PathBuf::from);
        let bar = "█".repeat(40);
        let expected = format!(
            "a.jsonl: line 1: 7 tokens, 3 trained
  Hi?«⏎»
  «Ok»\\u{{1b}}

Rows by their tokens:
      1 to    50 │{bar} 1,000
     51 to   100 │
    101 to   150 │█ 1
    151 to 9,000 │█ 3, too long

1,204 rows read, 1,200 kept: 30,000 tokens, 10,000 of them trained (33.3 %)

1 row wrong:
  b.parquet: row 7: no

5 rows with more than 150 tokens (--max-length):
  a.jsonl: lines 4, 9
  b.parquet: row 2
  and 2 more
"
        );
        assert_eq!(preview(&survey(), &files, 150, TRAINED_MARKERS, &text), expected);
    }

    #[test]
    fn pairs_show_source_decoder_input_and_labels() {
        use super::super::PairLimits;
        let files = ["a.jsonl", "b.parquet"].map(PathBuf::from);
        let of = |text: &str| text.bytes().map(i32::from).collect::<Vec<_>>();
        let start = DecoderStart { token: 42, pad: Some(95) };
        let mut labels = of("Hallo\n.");
        labels[1] = IGNORED;
        let row = Encoded { ids: of("Hi"), labels, cut: [3, 0], ..Encoded::default() };
        let first = vec![FirstRow { place: RowLocation { file: 0, at: RowNumber::Line(1) }, row }];
        let bucket = LengthBucket { from: 1, to: 5, rows: 1, tokens: 5, trained_tokens: 0 };
        let survey = Survey {
            pairs: Some(Pairs { limits: PairLimits { source: 2, target: 9 }, start }),
            first,
            lengths: vec![LengthBucket { from: 3, ..bucket }],
            target_lengths: vec![LengthBucket { to: 9, ..bucket }],
            problems: CappedList { count: 0, first: Vec::new() },
            too_long: CappedList { count: 0, first: Vec::new() },
            ..survey()
        };
        let bar = "█".repeat(40);
        let expected = format!(
            "a.jsonl: line 1: 2 source tokens (3 more truncated), 7 labels, 6 trained
  source:
  Hi
  decoder input:
  *H_llo⏎
  
  labels:
  «H»[1 × -100]«llo⏎»
  «.»

Rows by their source tokens:
  3 to 5 │{bar} 1, truncated

Rows by their target tokens:
  1 to 9 │{bar} 1

1,204 rows"
        );
        let shown = preview(&survey, &files, 150, TRAINED_MARKERS, &text);
        assert!(shown.starts_with(&expected), "{shown}");
    }

    #[test]
    fn the_middle_of_long_rows_is_omitted() {
        let mut survey = survey();
        let ids: Vec<i32> = [vec![97; 1000], vec![98; 197_000], vec![99; 2000]].concat();
        survey.first[0].row = Encoded { labels: ids.clone(), ids, ..Encoded::default() };
        let files = ["a.jsonl", "b.parquet"].map(PathBuf::from);
        let shown = preview(&survey, &files, 150, TRAINED_MARKERS, &text);
        let (a, c) = ("a".repeat(999), "c".repeat(1000));
        let expected =
            format!("200,000 tokens, 199,999 trained\n  a«{a}»\n  […198,000 tokens omitted…]\n  «{c}»\n\n");
        assert!(shown.contains(&expected), "{shown}");
        assert_eq!((omitted_range(2000), omitted_range(2001)), (None, Some(1000..1001)));
    }

    #[test]
    fn colours_end_at_line_ends() {
        let files = ["a.jsonl", "b.parquet"].map(PathBuf::from);
        let coloured = preview(&survey(), &files, 150, ["<green>", "</>"], &text);
        assert!(coloured.contains("  Hi?<green>⏎</>\n  <green>Ok</>\\u{1b}\n"), "{coloured}");
    }
}
