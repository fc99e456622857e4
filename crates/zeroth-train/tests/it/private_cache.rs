//! The token cache is private: files of others are ignored, and its own are not readable for them.

#![allow(clippy::print_stdout, reason = "a test that is skipped says so")]

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};

use zeroth_data::{
    CacheFolder, DataError, Encoder, EncoderOptions, PrepareOptions, Prepared, Truncation, prepare,
};
use zeroth_train::{BatchShape, Batches, SampleOrder, TokenBatch};

const OPTIONS: PrepareOptions =
    PrepareOptions { max_length: 64, truncation: Truncation::Drop, max_samples: None, packing: false };
/// A user that owns nothing here.
const STRANGER: u32 = 54321;

struct Place {
    folder: tempfile::TempDir,
    file: PathBuf,
}

impl Place {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("rows.jsonl");
        let row = |row: i32| format!("{{\"input_ids\": [{row}, 1, 2, 3]}}\n");
        fs::write(&file, (0..100).map(row).collect::<String>()).unwrap();
        Self { folder, file }
    }

    fn cache(&self) -> PathBuf {
        self.folder.path().join("cache")
    }

    fn tokens(&self) -> PathBuf {
        self.cache().join("tokens")
    }

    fn prepare(&self, cache: &CacheFolder) -> Result<Prepared, DataError> {
        let encoder = Encoder::open(Path::new("there is no tokenizer"), EncoderOptions::new(100)).unwrap();
        prepare(std::slice::from_ref(&self.file), &encoder, &OPTIONS, cache)
    }

    fn named(&self) -> Result<Prepared, DataError> {
        self.prepare(&CacheFolder::at(self.cache()))
    }

    /// With the cache folder as the user's default.
    fn by_default(&self) -> Result<Prepared, DataError> {
        let home = self.folder.path().join("home");
        fs::create_dir_all(home.join(".cache")).unwrap();
        if !home.join(".cache/zeroth").exists() {
            symlink(self.cache(), home.join(".cache/zeroth")).unwrap();
        }
        let cache = CacheFolder::from_environment(|name| (name == "HOME").then(|| home.clone().into()));
        self.prepare(&cache.or_temporary_in(self.folder.path()))
    }
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().mode() & 0o777
}

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

/// Changes a file's owner; `false` without permission.
fn give_away(path: &Path) -> bool {
    let given = chown(path, Some(STRANGER), Some(STRANGER)).is_ok();
    if !given {
        println!("skipped: giving a file to another user needs root (sudo -E cargo test -p zeroth-train)");
    }
    given
}

#[test]
fn cache_files_are_private() {
    let place = Place::new();
    let prepared = place.named().unwrap();
    assert_eq!([place.cache(), place.tokens()].map(|folder| mode(&folder)), [0o700, 0o700]);
    assert_eq!(mode(&prepared.path), 0o600);
}

#[test]
fn a_writable_token_folder_is_made_private() {
    let place = Place::new();
    fs::create_dir_all(place.tokens()).unwrap();
    set_mode(&place.tokens(), 0o777);
    place.named().unwrap();
    assert_eq!(mode(&place.tokens()), 0o700);
}

#[test]
fn a_writable_cache_folder_is_made_private_or_refused() {
    let place = Place::new();
    fs::create_dir(place.cache()).unwrap();
    set_mode(&place.cache(), 0o777);
    let error = place.named().unwrap_err().to_string();
    assert!(error.contains("others may write to ") && error.contains("chmod go-w "), "{error}");
    assert_eq!(mode(&place.cache()), 0o777, "it is the user's");
    assert!(place.by_default().unwrap().unusable.is_empty());
    assert_eq!(mode(&place.cache()), 0o700);
    assert!(place.named().unwrap().found);
}

#[test]
fn a_writable_cache_file_is_recreated() {
    let place = Place::new();
    let prepared = place.named().unwrap();
    set_mode(&prepared.path, 0o666);
    assert!(!place.named().unwrap().found);
    assert_eq!(mode(&prepared.path), 0o600);
    assert!(place.named().unwrap().found);
}

#[test]
fn symlinks_are_not_followed() {
    let place = Place::new();
    let prepared = place.named().unwrap();
    let moved = place.folder.path().join("moved.tokens");
    fs::rename(&prepared.path, &moved).unwrap();
    symlink(&moved, &prepared.path).unwrap();
    let before = fs::read(&moved).unwrap();
    assert!(!place.named().unwrap().found);
    assert!(fs::symlink_metadata(&prepared.path).unwrap().is_file());
    assert_eq!(fs::read(&moved).unwrap(), before);

    // Nor one in place of the whole folder.
    fs::rename(place.tokens(), place.folder.path().join("elsewhere")).unwrap();
    symlink(place.folder.path().join("elsewhere"), place.tokens()).unwrap();
    assert!(place.named().is_err());
}

#[test]
fn symlinks_are_not_written_through() {
    let place = Place::new();
    fs::create_dir_all(place.tokens()).unwrap();
    let prepared = place.named().unwrap();
    let name = prepared.path.file_name().unwrap().to_str().unwrap().to_owned();
    fs::remove_file(&prepared.path).unwrap();
    let precious = place.folder.path().join("precious");
    fs::write(&precious, "mine").unwrap();
    for writer in 0..50 {
        let planted = format!(".{name}.unfinished-{}-{writer}", zeroth_base::ProcessOwner::own());
        symlink(&precious, place.tokens().join(planted)).unwrap();
    }
    assert!(!place.named().unwrap().found);
    assert_eq!(fs::read_to_string(&precious).unwrap(), "mine");
}

#[test]
fn caches_of_other_users_are_ignored() {
    let place = Place::new();
    let prepared = place.named().unwrap();
    if !give_away(&prepared.path) {
        return;
    }
    assert!(!place.named().unwrap().found);
    assert!(place.named().unwrap().found);
}

#[test]
fn folders_of_other_users_are_refused_or_skipped() {
    for part in ["", "tokens"] {
        let place = Place::new();
        place.named().unwrap();
        if !give_away(&place.cache().join(part)) {
            return;
        }
        let error = place.named().unwrap_err().to_string();
        assert!(error.contains(&format!("belongs to user {STRANGER}, not to the current user ")), "{error}");
        let prepared = place.by_default().unwrap();
        assert!(!prepared.found);
        let (_, why) = &prepared.unusable[0];
        assert!(why.to_string().contains("belongs to user 54321"), "{why}");
    }
}

#[test]
fn a_truncated_cache_is_an_error() {
    let place = Place::new();
    let prepared = place.named().unwrap();
    let samples = &prepared.samples;
    let shape = BatchShape { micro_batch: 2, accumulation: 1, ranks: 1 };
    let batches = Batches::new(samples, SampleOrder::new(samples.count(), None), shape);
    let mut batch = TokenBatch::default();
    batches.fill(0, 0, 0, &mut batch).unwrap();
    assert_eq!(batch.ids, [0, 1, 2, 3, 1, 1, 2, 3]);
    fs::File::options().write(true).open(&prepared.path).unwrap().set_len(300).unwrap();
    let error = batches.fill(9, 0, 0, &mut batch).unwrap_err();
    assert!(matches!(error, DataError::ReadCache { sample: 18, .. }), "{error}");
    assert_eq!(
        error.to_string(),
        format!(
            "cannot read sample 18 from the token cache {}: the file was truncated after it was opened; start again to tokenise the data anew",
            prepared.path.display()
        )
    );
}
