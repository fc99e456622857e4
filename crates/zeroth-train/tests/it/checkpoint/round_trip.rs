//! Checkpoints round-trip, however many ranks wrote them.

use std::ops::Range;
use std::process::Command;

use proptest::prelude::*;
use zeroth_base::DType;
use zeroth_engine::StateKind;
use zeroth_kernel::Moment;
use zeroth_train::checkpoint::{
    Checkpoint, CheckpointError, SAVED_STATES, ShardPiece, ShardWriter, UnfinishedCheckpoint, free_bytes,
    needed_bytes,
};

use super::sample::{LOSS_SCALE, Model, dtype_of, files_in, number, numbers_of};

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn any_cut_into_ranks_loads_bit_by_bit_in_any_ranges(
        cuts in prop::collection::vec(0_u64..2_000, 0..5),
        chunk in 1_usize..3_000,
        stride in 1_u64..400,
    ) {
        let (model, folder) = (Model::new(), tempfile::tempdir().unwrap());
        let cuts: Vec<u64> = cuts.iter().map(|cut| cut % model.table.total()).collect();
        let path = model.save_cut(folder.path(), 7, &cuts, chunk).unwrap();
        let checkpoint = Checkpoint::open(&path).unwrap();
        let verified = checkpoint.verify().unwrap();
        prop_assert_eq!(verified.bytes, checkpoint.manifest().bytes());
        prop_assert!(model.is_held_by(&checkpoint, stride));
        checkpoint.check_model("qwen3", &model.table).unwrap();
    }
}

#[test]
fn manifests_round_trip_exactly() {
    let (model, folder) = (Model::new(), tempfile::tempdir().unwrap());
    let path = model.save(folder.path(), 7);
    let checkpoint = Checkpoint::open(&path).unwrap();
    let manifest = checkpoint.manifest();
    assert_eq!(manifest.control.loss_scale.to_bits(), LOSS_SCALE.to_bits());
    assert_eq!(manifest.seed, u64::MAX);
    let mut expected = model.manifest(7, 1);
    expected.files.clone_from(&manifest.files);
    assert_eq!(*manifest, expected);
    let names: Vec<&str> = manifest.files.iter().map(|file| file.name.as_str()).collect();
    assert_eq!(
        names,
        [
            "model/chat_template.jinja",
            "model/config.json",
            "model/tokenizer.json",
            "rank-00000-of-00001.safetensors"
        ]
    );
    assert_eq!(std::fs::read_to_string(folder.path().join("latest")).unwrap(), "step-7");
}

#[test]
fn checksums_match_sha256sum() {
    let (model, folder) = (Model::new(), tempfile::tempdir().unwrap());
    let path = model.save_cut(folder.path(), 7, &[500], 100).unwrap();
    let ended =
        Command::new("sha256sum").args(["--check", "SHA256SUMS"]).current_dir(&path).output().unwrap();
    let said = String::from_utf8(ended.stdout).unwrap();
    assert!(ended.status.success(), "{said}");
    assert_eq!(said.lines().count(), files_in(&path).len() - 1, "{said}");
}

#[test]
fn adjacent_pieces_are_merged() {
    let folder = tempfile::tempdir().unwrap();
    let unfinished = UnfinishedCheckpoint::begin(folder.path(), 1).unwrap();
    let piece = |first, count| ShardPiece {
        state: StateKind::Moment(Moment::First),
        name: "a.weight".to_owned(),
        first,
        count,
        dtype: dtype_of(StateKind::Moment(Moment::First)),
    };
    let pieces = vec![piece(10, 5), piece(15, 0), piece(15, 7), piece(30, 2)];
    let numbers: Vec<f32> = pieces.iter().flat_map(|piece| numbers_of(1, piece)).collect();
    let mut part = ShardWriter::create(unfinished.path(), 3, 11, pieces.clone()).unwrap();
    assert_eq!(part.next(), Some((StateKind::Moment(Moment::First), "a.weight", 10)));
    part.append_f32(&numbers[..6]).unwrap();
    assert_eq!(part.next(), Some((StateKind::Moment(Moment::First), "a.weight", 16)));
    let rest: Vec<u8> =
        numbers[6..].iter().flat_map(|number| half::bf16::from_f32(*number).to_le_bytes()).collect();
    part.append(&rest).unwrap();
    assert_eq!(part.next(), None);
    let total = part.total();
    let written = part.finish().unwrap();
    assert_eq!(
        (written.entry().name.as_str(), written.entry().bytes),
        ("rank-00003-of-00011.safetensors", total)
    );

    let bytes = std::fs::read(unfinished.path().join(&written.entry().name)).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    assert_eq!(header["__metadata__"]["zeroth_checkpoint"], "1");
    assert_eq!(header["first/a.weight@10"]["shape"], serde_json::json!([12]));
    assert_eq!(header["first/a.weight@30"]["data_offsets"], serde_json::json!([24, 28]));
    assert_eq!(header.as_object().unwrap().len(), 3);
    let last = half::bf16::from_f32(number(1, StateKind::Moment(Moment::First), "a.weight", 31));
    assert_eq!(bytes[bytes.len() - 2..], last.to_le_bytes());
}

#[test]
fn shards_take_exactly_their_declared_pieces() {
    let (model, folder) = (Model::new(), tempfile::tempdir().unwrap());
    let unfinished = UnfinishedCheckpoint::begin(folder.path(), 1).unwrap();
    let total = model.table.total();
    let part = |rank| ShardWriter::create(unfinished.path(), rank, 3, model.pieces(0..total)).unwrap();

    let mut short = part(0);
    short.append_f32(&[0.0; 9]).unwrap();
    let error = short.finish().unwrap_err();
    assert!(error.to_string().contains("ended before element 9 of weights/model.embed"), "{error}");

    let mut long = part(1);
    long.append_f32(&vec![0.0; SAVED_STATES.len() * total as usize]).unwrap();
    let error = long.append_f32(&[0.0]).unwrap_err();
    assert!(error.to_string().contains("1 more were appended"), "{error}");
    drop(long);

    let mut torn = part(2);
    let error = torn.append(&[0; 6]).unwrap_err();
    assert!(error.to_string().contains("6 bytes are not whole elements of 4"), "{error}");
    drop(torn);
    assert_eq!(files_in(unfinished.path()).len(), 0);

    let gradient = ShardPiece { state: StateKind::Gradient, ..model.pieces(0..total)[0].clone() };
    assert!(ShardWriter::create(unfinished.path(), 0, 1, vec![gradient]).is_err());
    drop(unfinished);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn missing_ranges_and_states_are_refused() {
    let (model, folder) = (Model::new(), tempfile::tempdir().unwrap());
    let checkpoint = Checkpoint::open(&model.save(folder.path(), 1)).unwrap();
    let name = "model.norm.weight";
    let read = |state, name: &str, range, room| {
        checkpoint.read_f32(state, name, range, &mut vec![0.0; room]).unwrap_err()
    };
    for (range, room) in [(0..9, 9), (0..4, 3), (Range { start: u64::MAX, end: 3 }, 3)] {
        let error = read(StateKind::Moment(Moment::First), name, range, room);
        assert!(matches!(error, CheckpointError::Range { elements: 8, .. }), "{error}");
    }
    assert!(matches!(read(StateKind::Gradient, name, 0..1, 1), CheckpointError::NoState { .. }));
    assert!(matches!(
        read(StateKind::Weights, "model.nrom.weight", 0..1, 1),
        CheckpointError::NoState { .. }
    ));
    checkpoint.read_f32(StateKind::Moment(Moment::First), name, 3..3, &mut []).unwrap();
}

#[test]
fn frozen_parameters_have_weights_only() {
    let (model, folder) = (Model::new(), tempfile::tempdir().unwrap());
    let frozen = "model.norm.weight";
    let unfinished = UnfinishedCheckpoint::begin(folder.path(), 1).unwrap();
    let mut pieces = model.pieces(0..model.table.total());
    pieces.retain(|piece| piece.state == StateKind::Weights || piece.name != frozen);
    let numbers: Vec<f32> = pieces.iter().flat_map(|piece| numbers_of(1, piece)).collect();
    let mut part = ShardWriter::create(unfinished.path(), 0, 1, pieces).unwrap();
    part.append_f32(&numbers).unwrap();
    let mut manifest = model.manifest(1, 1);
    for entry in &mut manifest.model.parameters {
        entry.trained = entry.name != frozen;
    }
    manifest.files.push(part.finish().unwrap().entry().clone());
    let path = unfinished.commit(manifest, &model.files()).unwrap();
    let checkpoint = Checkpoint::open(&path).unwrap();
    let mut one = [0.0];
    checkpoint.read_f32(StateKind::Weights, frozen, 0..1, &mut one).unwrap();
    assert!(checkpoint.read_f32(StateKind::Moment(Moment::Second), frozen, 0..1, &mut one).is_err());
}

#[test]
fn needed_bytes_is_an_upper_bound() {
    let (model, folder) = (Model::new(), tempfile::tempdir().unwrap());
    let path = model.save_cut(folder.path(), 1, &[100, 200, 300, 400], 50).unwrap();
    let taken: u64 = files_in(&path).iter().map(|path| path.metadata().unwrap().len()).sum();
    let states = [
        (StateKind::Weights, DType::F32),
        (StateKind::Moment(Moment::First), DType::Bf16),
        (StateKind::Moment(Moment::Second), DType::F32),
    ];
    let needed = needed_bytes(&model.table, &states, model.folder.path());
    assert!(needed > taken && needed < taken + (128 << 10), "{needed} for {taken}");
    assert!(free_bytes(&folder.path().join("not/yet")).unwrap() > 0);
}
