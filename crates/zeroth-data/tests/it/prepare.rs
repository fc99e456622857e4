//! Preparing data in the token cache: cache hits, recreation, and errors.

use std::fs;
use std::io::Write as _;
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::{Map, Value};
use zeroth_data::{
    CacheFolder, Encode, Encoded, Encoder, EncoderOptions, PrepareOptions, Prepared, RowProblem, Samples,
    SamplesBuilder, Truncation, prepare,
};

const OPTIONS: PrepareOptions =
    PrepareOptions { max_length: 6, truncation: Truncation::Drop, max_samples: None, packing: false };

const ROWS: &str = "{\"input_ids\": [1, 2, 3]}\n{\"input_ids\": [4, 5], \"labels\": [-100, 5]}\n\
                    {\"input_ids\": [6, 7, 8, 9, 10, 11, 12]}\n{\"input_ids\": [13]}\n{\"input_ids\": [14, 15]}\n";

/// An encoder without a tokenizer.
fn ready_tokens() -> Encoder {
    Encoder::open(Path::new("there is no tokenizer"), EncoderOptions::new(100)).unwrap()
}

/// An encoder of ready tokens that counts encoded rows.
struct Counting {
    tokens: Encoder,
    name: u8,
    rows: AtomicU64,
}

impl Counting {
    fn new() -> Self {
        Self { tokens: ready_tokens(), name: 0, rows: AtomicU64::new(0) }
    }

    fn rows(&self) -> u64 {
        self.rows.load(Ordering::Relaxed)
    }
}

impl Encode for Counting {
    fn encode(&self, row: &Map<String, Value>, into: &mut Encoded) -> Result<(), RowProblem> {
        self.rows.fetch_add(1, Ordering::Relaxed);
        self.tokens.encode(row, into)
    }

    fn fingerprint(&self) -> [u8; 32] {
        [self.name; 32]
    }
}

/// A folder with data files and a cache.
struct Place {
    folder: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn write(&self, name: &str, contents: impl AsRef<[u8]>) -> PathBuf {
        fs::write(self.path(name), contents).unwrap();
        self.path(name)
    }

    fn cache(&self) -> CacheFolder {
        CacheFolder::at(self.path("cache"))
    }

    fn prepare(&self, files: &[PathBuf], options: &PrepareOptions) -> Prepared {
        prepare(files, &Counting::new(), options, &self.cache()).unwrap()
    }

    /// The message without the folder's name.
    fn refusal(&self, files: &[PathBuf]) -> String {
        let error = prepare(files, &Counting::new(), &OPTIONS, &self.cache()).unwrap_err();
        error.to_string().replace(&format!("{}/", self.folder.path().display()), "")
    }
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

#[test]
fn a_second_call_uses_the_cache() {
    let place = Place::new();
    let file = place.write("a.jsonl", ROWS);
    let encoder = Counting::new();
    let first = prepare(std::slice::from_ref(&file), &encoder, &OPTIONS, &place.cache()).unwrap();
    assert_eq!((first.found, first.rows, encoder.rows()), (false, 5, 5));
    let second = prepare(std::slice::from_ref(&file), &encoder, &OPTIONS, &place.cache()).unwrap();
    assert_eq!((second.found, second.rows, encoder.rows()), (true, 5, 5));
    assert_eq!(second.path, first.path);

    let mut in_memory = SamplesBuilder::new(6);
    for (ids, labels) in [
        (&[1, 2, 3][..], &[1, 2, 3][..]),
        (&[4, 5], &[-100, 5]),
        (&[6, 7, 8, 9, 10, 11, 12], &[6, 7, 8, 9, 10, 11, 12]),
        (&[13], &[13]),
        (&[14, 15], &[14, 15]),
    ] {
        in_memory.push(ids, labels);
    }
    let in_memory = in_memory.finish().unwrap();
    assert_eq!((in_memory.totals().samples, in_memory.totals().too_long), (4, 1));
    for samples in [&first.samples, &second.samples, &Samples::open(&first.path).unwrap()] {
        assert_eq!(*samples, in_memory);
        assert_eq!(samples.hash(), in_memory.hash());
        assert_eq!((samples.ids(1).unwrap(), samples.labels(1).unwrap()), (vec![4, 5], vec![-100, 5]));
        assert_eq!((samples.length(0), samples.trained(0), samples.longest()), (3, 2, 3));
        assert_eq!(samples.members(2).collect::<Vec<_>>(), [2]);
    }
    assert_eq!(names(first.path.parent().unwrap()).len(), 1);
}

#[test]
fn the_cache_key_covers_data_encoder_and_options() {
    let place = Place::new();
    let file = [place.write("a.jsonl", ROWS)];
    let first = place.prepare(&file, &OPTIONS);
    for options in [
        PrepareOptions { max_length: 7, ..OPTIONS },
        PrepareOptions { truncation: Truncation::Left, ..OPTIONS },
        PrepareOptions { truncation: Truncation::Right, ..OPTIONS },
        PrepareOptions { max_samples: NonZeroU64::new(4), ..OPTIONS },
        PrepareOptions { packing: true, ..OPTIONS },
    ] {
        assert!(!place.prepare(&file, &options).found, "{options:?}");
        assert!(place.prepare(&file, &options).found, "{options:?}");
    }
    let other = Counting { name: 1, ..Counting::new() };
    assert!(!prepare(&file, &other, &OPTIONS, &place.cache()).unwrap().found);
    let other = [place.write("b.jsonl", ROWS.replace("15", "16"))];
    assert!(!place.prepare(&other, &OPTIONS).found);

    // The same data under another name, or split over two files, which is only known once it is read.
    let moved = [place.write("c.jsonl", ROWS)];
    assert!(place.prepare(&moved, &OPTIONS).found);
    let (one, two) = ROWS.split_at(ROWS.find("{\"input_ids\": [13]").unwrap());
    let split = place.prepare(&[place.write("d.jsonl", one), place.write("e.jsonl", two)], &OPTIONS);
    assert!(!split.found);
    assert_eq!(split.samples, first.samples);
}

#[test]
fn damaged_caches_are_recreated() {
    let place = Place::new();
    let file = [place.write("a.jsonl", ROWS)];
    let options = PrepareOptions { packing: true, ..OPTIONS };
    let first = place.prepare(&file, &options);
    let whole = fs::read(&first.path).unwrap();
    let mut damages: Vec<Vec<u8>> = (0..whole.len())
        .step_by(11)
        .map(|place| {
            let mut bytes = whole.clone();
            bytes[place] ^= 1 << (place % 8);
            bytes
        })
        .collect();
    damages.extend([0, 1, 100, 255, 256, 300, whole.len() - 1].map(|length| whole[..length].to_vec()));
    damages.push([&whole[..], &[0]].concat());
    damages.push(b"something else".repeat(100));
    for damage in damages {
        fs::write(&first.path, &damage).unwrap();
        let again = place.prepare(&file, &options);
        assert!(!again.found);
        assert_eq!(again.samples, first.samples);
        assert_eq!(fs::read(&again.path).unwrap(), whole);
    }
    // A valid cache of other data under this name is not used.
    let other = place.prepare(&[place.write("b.jsonl", "{\"input_ids\": [1]}")], &options);
    fs::copy(&other.path, &first.path).unwrap();
    assert_eq!(place.prepare(&file, &options).samples, first.samples);
}

#[test]
fn invalid_headers_and_sizes_are_refused() {
    let place = Place::new();
    let file = [place.write("a.jsonl", ROWS)];
    let whole = fs::read(place.prepare(&file, &OPTIONS).path).unwrap();
    let refusal = |bytes: &[u8]| {
        let path = place.write("x.tokens", bytes);
        let message = Samples::open(&path).unwrap_err().to_string();
        let beginning = format!("{} is not a valid token cache: ", path.display());
        message.strip_prefix(&beginning).unwrap().strip_suffix("; prepare the data again").unwrap().to_owned()
    };
    let flipped = |at: usize| {
        let mut bytes = whole.clone();
        bytes[at] ^= 4;
        bytes
    };
    assert_eq!(refusal(&whole[..200]), "it is too short for a header");
    assert_eq!(refusal(&flipped(3)), "it has no valid magic number");
    assert_eq!(refusal(&flipped(8)), "it has another version");
    for place in [16, 40, 100, 200, 255] {
        assert_eq!(refusal(&flipped(place)), "its header does not match the header's checksum");
    }
    assert_eq!(refusal(&whole[..whole.len() - 4]), "its length does not match its header");
    let absent = place.path("absent.tokens");
    assert_eq!(
        Samples::open(&absent).unwrap_err().to_string(),
        format!("cannot open the token cache {}: No such file or directory (os error 2)", absent.display())
    );
}

#[test]
fn an_unwritable_cache_falls_back_to_a_temporary_file() {
    let place = Place::new();
    let file = [place.write("a.jsonl", ROWS)];
    let in_the_way = place.write("in-the-way", "");
    let home = |name: &str| (name == "XDG_CACHE_HOME").then(|| in_the_way.clone().into_os_string());
    for (cache, unusable) in
        [(CacheFolder::from_environment(home), 1), (CacheFolder::from_environment(|_| None), 0)]
    {
        let cache = cache.or_temporary_in(place.folder.path());
        let prepared = prepare(&file, &Counting::new(), &OPTIONS, &cache).unwrap();
        assert_eq!(prepared.unusable.len(), unusable);
        assert_eq!(Samples::open(&prepared.path).unwrap(), prepared.samples);
        assert_eq!(names(place.folder.path()).len(), 2, "nothing is left in the folder");
        assert!(!prepare(&file, &Counting::new(), &OPTIONS, &cache).unwrap().found);
    }

    let nowhere = CacheFolder::from_environment(home).or_temporary_in(&in_the_way);
    let error = prepare(&file, &Counting::new(), &OPTIONS, &nowhere).unwrap_err();
    let folder = in_the_way.display();
    assert_eq!(
        error.to_string(),
        format!(
            "cannot write the token cache in {folder}/zeroth/tokens: Not a directory (os error 20), nor in {folder}: \
             Not a directory (os error 20); set ZEROTH_CACHE to a writable folder"
        )
    );
    let error = prepare(&file, &Counting::new(), &OPTIONS, &CacheFolder::default()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "cannot write the token cache: neither ZEROTH_CACHE nor HOME is set; set ZEROTH_CACHE to a writable folder"
    );
}

#[test]
fn an_explicit_cache_folder_has_no_fallback() {
    let place = Place::new();
    let file = [place.write("a.jsonl", ROWS)];
    let in_the_way = place.write("in-the-way", "");
    let cache = CacheFolder::at(&in_the_way).or_temporary_in(place.folder.path());
    let error = prepare(&file, &Counting::new(), &OPTIONS, &cache).unwrap_err().to_string();
    assert!(error.starts_with("cannot write the token cache in "), "{error}");
}

#[test]
fn the_cache_location_follows_the_environment() {
    let folder = |variables: &[(&str, &str)]| {
        let found = CacheFolder::from_environment(|name| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into())
        });
        found.folder().map(|folder| folder.display().to_string())
    };
    let (home, xdg) = (("HOME", "/home/u"), ("XDG_CACHE_HOME", "/x"));
    assert_eq!(folder(&[home, xdg, ("ZEROTH_CACHE", "/z")]).as_deref(), Some("/z"));
    assert_eq!(folder(&[home, xdg, ("ZEROTH_CACHE", "")]).as_deref(), Some("/x/zeroth"));
    assert_eq!(folder(&[home, ("XDG_CACHE_HOME", "relative")]).as_deref(), Some("/home/u/.cache/zeroth"));
    assert_eq!(folder(&[home]).as_deref(), Some("/home/u/.cache/zeroth"));
    assert_eq!(folder(&[]), None);
}

#[test]
fn concurrent_preparation_gives_one_cache() {
    let place = Place::new();
    let file = [place.write("a.jsonl", "{\"input_ids\": [1, 2, 3]}\n{\"input_ids\": [4]}\n".repeat(1000))];
    let prepared: Vec<Prepared> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4).map(|_| scope.spawn(|| place.prepare(&file, &OPTIONS))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(prepared.iter().all(|one| one.samples == prepared[0].samples));
    assert_eq!(names(prepared[0].path.parent().unwrap()).len(), 1);
}

#[test]
fn old_leftovers_are_swept() {
    let place = Place::new();
    let file = [place.write("a.jsonl", ROWS)];
    fs::create_dir_all(place.path("cache/tokens")).unwrap();
    let (old, held, new) = (
        "cache/tokens/.k.tokens.unfinished-1-0",
        "cache/tokens/.k.tokens.unfinished-2-0",
        "cache/tokens/.k.tokens.unfinished-3-0",
    );
    let long_ago = std::time::SystemTime::UNIX_EPOCH + std::time::Duration::from_hours(24 * 365);
    let old_file = |name| {
        let file = fs::File::create(place.path(name)).unwrap();
        file.set_modified(long_ago).unwrap();
        file
    };
    drop(old_file(old));
    let holder = old_file(held);
    holder.lock().unwrap();
    place.write(new, "");
    place.prepare(&file, &OPTIONS);
    assert_eq!([old, held, new].map(|name| place.path(name).exists()), [false, true, true]);
}

#[test]
fn the_first_invalid_row_stops_preparation() {
    let place = Place::new();
    let good = "{\"input_ids\": [1]}\n".repeat(300);
    let file = [place.write("a.jsonl", format!("{good}\n{{\"input_ids\": [1, 100]}}\n17\n{good}[\n"))];
    let message = "a.jsonl: line 302: input_ids[1] is 100: the model's vocabulary has 100 tokens, 0 to 99; was the \
                   data made with another tokenizer?";
    for _ in 0..5 {
        assert_eq!(place.refusal(&file), message);
    }
    assert!(names(&place.path("cache/tokens")).is_empty());
    // Rows beyond the requested samples are ignored.
    let most = |most| PrepareOptions { max_samples: NonZeroU64::new(most), ..OPTIONS };
    assert_eq!(place.prepare(&file, &most(300)).samples.count().get(), 300);
    assert!(prepare(&file, &Counting::new(), &most(301), &place.cache()).is_err());
}

#[test]
fn a_growing_file_leaves_no_cache() {
    struct Growing(PathBuf);

    impl Encode for Growing {
        fn encode(&self, row: &Map<String, Value>, into: &mut Encoded) -> Result<(), RowProblem> {
            let mut file = fs::File::options().append(true).open(&self.0).unwrap();
            file.write_all(b"\n").unwrap();
            ready_tokens().encode(row, into)
        }

        fn fingerprint(&self) -> [u8; 32] {
            [0; 32]
        }
    }

    let place = Place::new();
    let file = place.write("a.jsonl", ROWS);
    let error =
        prepare(std::slice::from_ref(&file), &Growing(file.clone()), &OPTIONS, &place.cache()).unwrap_err();
    assert_eq!(
        error.to_string(),
        format!("{} changed while being read: run again once it is complete", file.display())
    );
    assert!(names(&place.path("cache/tokens")).is_empty());
}

#[test]
fn file_errors_have_positions() {
    let place = Place::new();
    let good = place.write("good.jsonl", ROWS);
    for (contents, message) in [
        (
            "{\"input_ids\": [1]}\n{\"input_ids\": [1",
            ": line 2: not JSON: EOF while parsing a list, column 16; a row is one JSON object on one line",
        ),
        ("[\n{\"input_ids\": [1.5]}\n]", ": row 1 (line 2): input_ids[0] must be an integer: found 1.5"),
        ("\n \n", " has no rows: it is empty, or all lines are blank"),
        (
            "\u{1F}\u{FFFD}",
            ": line 1: not JSON: expected value, column 1; a row is one JSON object on one line",
        ),
        ("{\"input_ids\": [1.5]}", ": line 1: input_ids[0] must be an integer: found 1.5"),
        ("PAR1 and no more", " as Parquet (row 1): "),
    ] {
        let bad = place.write("bad.jsonl", contents);
        let found = place.refusal(&[good.clone(), bad]);
        if contents.starts_with("PAR1") {
            assert!(found.starts_with("cannot read bad.jsonl as Parquet (row 1): "), "{found}");
            assert!(found.ends_with("; is it complete?"), "{found}");
        } else {
            assert_eq!(found, format!("bad.jsonl{message}"));
        }
    }
    let zipped = place.write("bad.jsonl", b"\x1F\x8B\x08");
    assert_eq!(
        place.refusal(&[zipped]),
        "bad.jsonl is cut short: its gzip stream ends before the end of its first row: copy or download it again; `gzip -t \
         bad.jsonl` checks it"
    );
    assert_eq!(place.refusal(&[good, place.path("absent")]), "data file absent does not exist");
    assert_eq!(
        place.refusal(&[PathBuf::from("/dev/null")]),
        "/dev/null is a pipe or a device: data is read more than once, so write it to a file first"
    );
    assert_eq!(place.refusal(&[]), "no data: name at least one file or folder with --data");
}

#[test]
fn long_rows_are_dropped_or_truncated() {
    let place = Place::new();
    let row =
        "{\"input_ids\": [1, 2, 3, 4, 5, 6, 7, 8], \"labels\": [-100, -100, -100, -100, -100, -100, 7, 8]}\n";
    let file = [place.write("a.jsonl", format!("{row}{{\"input_ids\": [9, 9]}}\n"))];
    let cut = |truncation| place.prepare(&file, &PrepareOptions { truncation, ..OPTIONS }).samples;

    let (dropped, left, right) = (cut(Truncation::Drop), cut(Truncation::Left), cut(Truncation::Right));
    assert_eq!((dropped.count().get(), dropped.totals().too_long, dropped.totals().truncated), (1, 1, 0));
    assert_eq!(left.ids(0).unwrap(), [3, 4, 5, 6, 7, 8]);
    assert_eq!(left.labels(0).unwrap(), [-100, -100, -100, -100, 7, 8]);
    assert_eq!(right.ids(0).unwrap(), [1, 2, 3, 4, 5, 6]);
    let counts = |samples: &Samples| {
        (samples.totals().too_long, samples.totals().truncated, samples.totals().untrained)
    };
    assert_eq!((counts(&left), counts(&right)), ((0, 1, 0), (0, 1, 1)));
    assert_eq!(
        right.totals().notes(zeroth_data::LengthLimits::Rows(6)),
        [
            "1 row was truncated to 6 tokens (--max-length)",
            "1 row trains nothing: every label after the first is -100"
        ]
    );
}

#[test]
fn packs_are_cached() {
    let place = Place::new();
    let file = [place.write("a.jsonl", ROWS)];
    let options = PrepareOptions { packing: true, ..OPTIONS };
    let made = place.prepare(&file, &options).samples;
    let plain = place.prepare(&file, &OPTIONS).samples;
    assert_ne!(made.hash(), plain.hash());
    // Lengths 3, 2, 1, 2 in packs of 6: 3 + 2 + 1, and 2.
    let members = |unit| made.members(unit).collect::<Vec<_>>();
    assert_eq!(made.count().get(), 2);
    assert_eq!([members(0), members(1)], [vec![0, 1, 2], vec![3]]);
    assert_eq!([0, 1].map(|unit| (made.length(unit), made.trained(unit))), [(6, 3), (2, 1)]);
    assert_eq!((made.longest(), made.most_in_item()), (6, 3));
    let totals = made.totals();
    assert_eq!(
        (totals.samples, totals.packs, totals.fullness(zeroth_data::LengthLimits::Rows(6))),
        (4, 2, Some(vec![8.0 / 12.0]))
    );
    assert_eq!(
        totals.notes(zeroth_data::LengthLimits::Rows(6)).last().unwrap(),
        "4 samples were packed into 2 packs of up to 6 tokens, 66.7 % full"
    );
    let mut in_memory = SamplesBuilder::with(6, Truncation::Drop, true);
    for (ids, labels) in [
        (&[1, 2, 3][..], &[1, 2, 3][..]),
        (&[4, 5], &[-100, 5]),
        (&[0; 7], &[0; 7]),
        (&[13], &[13]),
        (&[14, 15], &[14, 15]),
    ] {
        in_memory.push(ids, labels);
    }
    assert_eq!(made, in_memory.finish().unwrap());
}
