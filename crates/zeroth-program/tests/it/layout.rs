//! A layout holds every element exactly once, on any number of ranks, and buckets never move one.

use proptest::prelude::*;
use zeroth_base::DType;
use zeroth_graph::{Builder, Graph, ParamSpec, Role, UnitId};
use zeroth_program::{BLOCK, FlatKind, Layout};

/// A graph of units with parameters of these many elements, each trained or not.
pub(crate) fn graph(units: &[Vec<(u64, bool)>]) -> Graph {
    let mut b = Builder::new(&[2]);
    b.unit(
        "embedding",
        Role::Embedding,
        vec![ParamSpec { name: "embed".to_owned(), shape: vec![3, 2], trainable: true, quantized: false }],
    )
    .unwrap();
    let (ids, embed) = (b.ids(), b.param("embed").unwrap());
    let x = b.embedding(ids, embed).unwrap();
    for (unit, params) in units.iter().enumerate() {
        let spec = |(index, (elements, trainable)): (usize, &(u64, bool))| ParamSpec {
            name: format!("{unit}.{index}"),
            shape: vec![*elements],
            trainable: *trainable,
            quantized: false,
        };
        b.unit(format!("unit {unit}"), Role::Other, params.iter().enumerate().map(spec).collect()).unwrap();
    }
    b.head_loss(x, embed).unwrap();
    b.finish().unwrap()
}

#[test]
fn parameters_start_on_blocks_and_shards_end_on_them() {
    let graph = graph(&[vec![(5000, true), (100, true), (2048, true), (7, false)]]);
    let layout = Layout::new(&graph, 3, 100, u64::MAX, DType::F32);
    let kinds: Vec<FlatKind> = layout.flats.iter().map(|flat| flat.kind).collect();
    let unit = UnitId::at(1);
    // The embedding's 6 elements and the 100 are below the threshold.
    assert_eq!(kinds, [FlatKind::Trained(unit), FlatKind::Frozen(unit), FlatKind::Persistent]);
    let flat = &layout.flats[0];
    let starts: Vec<u64> = flat.slots.iter().map(|slot| slot.start).collect();
    assert_eq!(starts, [0, 3 * BLOCK]);
    assert_eq!((flat.blocks, flat.elements()), (4, 7048));
    // 4 blocks on 3 ranks: 2, 2 and 0.
    let shards = [0, 1, 2].map(|rank| flat.shard(rank, 3));
    assert_eq!(shards, [0..2 * BLOCK, 2 * BLOCK..4 * BLOCK, 4 * BLOCK..4 * BLOCK]);
    assert_eq!(layout.persistent_elements(), 106);
}

#[test]
fn the_model_threshold_bounds_what_stays_gathered_in_all() {
    let graph = graph(&[vec![(5000, true), (100, true), (90, true)]]);
    // The embedding's 6 elements come first; 100 do not fit beside them, 90 do.
    for (model_persistence, kept) in [(0, 0), (6, 6), (96, 96), (105, 96), (106, 106), (u64::MAX, 196)] {
        let layout = Layout::new(&graph, 3, 100, model_persistence, DType::F32);
        assert_eq!(layout.persistent_elements(), kept, "{model_persistence}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn every_element_lives_in_one_place(
        units in prop::collection::vec(prop::collection::vec((1u64..9000, any::<bool>()), 0..5), 0..5),
        ranks in 1u64..9,
        persistence in 0u64..4000,
        model_persistence in 0u64..8000,
        bucket in 0u64..100_000,
    ) {
        let graph = graph(&units);
        let layout = Layout::new(&graph, ranks, persistence, model_persistence, DType::F32);
        let mut seen: Vec<u64> = vec![0; graph.params.len()];
        for flat in &layout.flats {
            // Shards are blocks, in order, without gap or overlap, and none is larger than its capacity.
            let mut end = 0;
            for rank in 0..ranks {
                let shard = flat.shard(rank, ranks);
                prop_assert_eq!(shard.start, end);
                prop_assert_eq!(shard.start % BLOCK, 0);
                prop_assert!(shard.end - shard.start <= flat.shard_capacity(ranks));
                end = shard.end;
                for piece in flat.pieces(shard.clone()) {
                    prop_assert!(shard.contains(&piece.at));
                    seen[piece.param.index()] += piece.elements.end - piece.elements.start;
                }
            }
            prop_assert_eq!(end, flat.padded());
            // Chunks cover a shard, each but the last as long as the bucket allows.
            let mut end = 0;
            for chunk in flat.chunks(ranks, bucket) {
                prop_assert_eq!(chunk.start, end);
                prop_assert!((chunk.end - chunk.start) * ranks <= bucket.max(BLOCK * ranks));
                end = chunk.end;
            }
            prop_assert_eq!(end, flat.shard_capacity(ranks));
        }
        for (param, seen) in graph.params.iter().zip(seen) {
            prop_assert_eq!(seen, param.elements());
        }
        for flat in layout.flats.iter().filter(|flat| flat.kind == FlatKind::Persistent) {
            prop_assert!(flat.slots.iter().all(|slot| slot.elements <= persistence));
            prop_assert!(flat.elements() <= model_persistence);
        }
    }

    #[test]
    fn places_lead_back_to_their_parameters(ranks in 1u64..5, persistence in 0u64..3000) {
        let graph = graph(&[vec![(10, true), (2500, false)], vec![(5000, true)]]);
        let layout = Layout::new(&graph, ranks, persistence, u64::MAX, DType::F32);
        for unit in &graph.units {
            for param in &unit.params {
                let (flat, slot) = layout.place(*param);
                prop_assert_eq!(slot.param, *param);
                prop_assert!(layout.flats[flat].slots.contains(&slot));
            }
        }
    }
}
