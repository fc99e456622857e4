use super::{DistillSpec, Teacher, TeacherRows, distill_loss};
use crate::reference::finite_differences::{DATA_ROWS, VOCAB, data, mismatch_with, specs};
use crate::{Builder, Graph, GraphError, Group, Op, ParamSpec, Role, Value};

const K: u64 = 3;

fn frozen(params: &[(&str, &[u64])]) -> Vec<ParamSpec> {
    specs(params).into_iter().map(|spec| ParamSpec { trainable: false, ..spec }).collect()
}

/// A student with a table and a tied head of width 4, and a teacher of width 3 with a vocabulary of its own.
fn online(spec: DistillSpec, alpha: f64, vocab: u64) -> Result<Graph, GraphError> {
    let mut b = Builder::new(&[DATA_ROWS]);
    b.teacher_unit(
        "teacher",
        frozen(&[("teacher.table", &[vocab.max(VOCAB), 3]), ("teacher.head", &[vocab, 3])]),
    )?;
    let hidden = b.embedding(b.ids(), b.param("teacher.table")?)?;
    b.unit("all", Role::Other, specs(&[("table", &[VOCAB, 4])]))?;
    let table = b.param("table")?;
    let x = b.embedding(b.ids(), table)?;
    let teacher = Teacher::Hidden { x: hidden, weight: b.param("teacher.head")? };
    b.distill_loss(x, table, teacher, spec, alpha)?;
    b.finish()
}

/// The same student with a cache; the graph and its cached inputs.
fn offline(
    spec: DistillSpec,
    alpha: f64,
    [k, vocab]: [u64; 2],
    tail: bool,
) -> Result<(Graph, [Value; 2]), GraphError> {
    let mut b = Builder::new(&[DATA_ROWS]);
    b.unit("all", Role::Other, specs(&[("table", &[VOCAB, 4])]))?;
    let table = b.param("table")?;
    let (ids, log_probs) = (b.input(0, k), b.statistic_input(0, k));
    let x = b.embedding(b.ids(), table)?;
    b.distill_loss(x, table, Teacher::TopK { ids, log_probs, vocab, tail }, spec, alpha)?;
    Ok((b.finish()?, [ids, log_probs]))
}

/// Distinct tokens of a row, from the far end of the vocabulary on.
fn cached_ids(k: u64, vocab: u64) -> Vec<i64> {
    let id = |row: u64, place: u64| ((row * 5 + vocab - 1 + place * (vocab - 1)) % vocab) as i64;
    (0..DATA_ROWS).flat_map(|row| (0..k).map(move |place| id(row, place))).collect()
}

fn every_spec() -> impl Iterator<Item = DistillSpec> {
    [0.0, 0.3, 1.0].into_iter().flat_map(|beta| {
        [(1.0, false), (2.0, false), (2.0, true)].map(|(temperature, squared)| DistillSpec {
            beta,
            temperature,
            squared,
        })
    })
}

#[test]
fn gradients_with_a_teacher_of_every_vocabulary() {
    for spec in every_spec() {
        for vocab in [VOCAB - 2, VOCAB, VOCAB + 3] {
            let graph = online(spec, 0.3, vocab).unwrap();
            assert_eq!(mismatch_with(&graph, &[data()], |_| ()), None, "{spec:?}, vocabulary {vocab}");
        }
    }
}

#[test]
fn gradients_with_cached_log_probabilities() {
    // The last: every token is listed, so that nothing is left for a tail, and the teacher has tokens that the student has not.
    for spec in every_spec() {
        for (k, vocab, tail) in
            [(K, VOCAB, true), (K, VOCAB, false), (K, VOCAB + 3, true), (VOCAB + 2, VOCAB + 2, true)]
        {
            let (graph, [ids, log_probs]) = offline(spec, 0.6, [k, vocab], tail).unwrap();
            let numbers: Vec<f64> = (0..DATA_ROWS * k).map(|at| -2.0 - (at * 7 % 5) as f64 * 0.3).collect();
            let found = mismatch_with(&graph, &[data()], |machine| {
                machine.set_input(ids, &cached_ids(k, vocab));
                machine.set_statistic_input(log_probs, &numbers);
            });
            assert_eq!(found, None, "{spec:?}, {k} of {vocab}, tail {tail}");
        }
    }
}

#[test]
fn a_cache_of_the_whole_vocabulary_equals_the_teacher() {
    let numbers = |count: usize, salt: usize| -> Vec<f64> {
        (0..count).map(|at| ((at * 37 + salt * 101) as f64 * 0.734_1).sin() * 2.0).collect()
    };
    let (rows, labels) = (5, [3, -100, 0, 6, 2]);
    let (x, w, teacher_x) = (numbers(rows * 4, 1), numbers(7 * 4, 2), numbers(rows * 3, 3));
    for (spec, vocab) in every_spec().flat_map(|spec| [(spec, 5), (spec, 7), (spec, 9)]) {
        let teacher_w = numbers(vocab * 3, 4);
        let logits = crate::op::linear(&teacher_x, &teacher_w, None, 3);
        let log_probs: Vec<f64> = logits
            .chunks_exact(vocab)
            .flat_map(|row| {
                let scaled: Vec<f64> = row.iter().map(|logit| logit / spec.temperature).collect();
                let lse = scaled.iter().map(|logit| logit.exp()).sum::<f64>().ln();
                scaled.into_iter().map(move |logit| logit - lse)
            })
            .collect();
        let ids: Vec<i64> = (0..rows).flat_map(|_| 0..vocab as i64).collect();
        let online = TeacherRows::Hidden { x: &teacher_x, w: &teacher_w };
        let expected = distill_loss(&x, &w, &labels, &online, spec, [0.4, 0.6]);
        for tail in [false, true] {
            // With a smaller vocabulary of the student, the teacher's further tokens do not count.
            let cached = TeacherRows::TopK { ids: &ids, log_probs: &log_probs, vocab, tail };
            let found = distill_loss(&x, &w, &labels, &cached, spec, [0.4, 0.6]);
            let pairs = [
                (&expected.0[..], &found.0[..]),
                (&expected.1[0], &found.1[0]),
                (&expected.1[1], &found.1[1]),
            ];
            for (expected, found) in pairs {
                let far = expected.iter().zip(found).any(|(a, b)| (a - b).abs() > 1e-12);
                assert!(!far, "{spec:?}, vocabulary {vocab}, tail {tail}: {expected:?} and {found:?}");
            }
        }
    }
}

#[test]
fn a_student_that_is_its_teacher_has_no_divergence() {
    let (x, w) = ([0.5, -1.5, 2.0, 0.25, 1.0, -0.5], [1.0, -2.0, 0.5, 3.0, -1.0, 0.75, 2.0, 2.5]);
    for spec in every_spec() {
        let teacher = TeacherRows::Hidden { x: &x, w: &w };
        let ([_, kd], [dx, dw]) = distill_loss(&x, &w, &[1, 0, 3], &teacher, spec, [0.0, 1.0]);
        let largest = dx.iter().chain(&dw).fold(0.0f64, |largest, gradient| largest.max(gradient.abs()));
        assert!(kd.abs() < 1e-12 && largest < 1e-12, "{spec:?}: {kd}, {largest}");
    }
}

#[test]
fn evaluation_is_the_students_cross_entropy() {
    let spec = DistillSpec { beta: 0.3, temperature: 2.0, squared: true };
    let (cached, [ids, log_probs]) = offline(spec, 1.0, [K, VOCAB], true).unwrap();
    for graph in [online(spec, 1.0, VOCAB).unwrap(), cached.clone()] {
        let evaluated = graph.evaluated();
        let ops: Vec<Op> = evaluated.nodes.iter().map(|node| node.op).collect();
        assert_eq!(ops, [Op::Embedding, Op::HeadLoss { part: 0 }]);
        let (head, of) = (&evaluated.nodes[1], graph.nodes.last().unwrap());
        assert_eq!(
            (&head.inputs[..], &head.params[..], &head.outputs[..]),
            (&of.inputs[..2], &of.params[..1], &of.outputs[..1])
        );
        assert_eq!(
            (&evaluated.units, &evaluated.params, &evaluated.values),
            (&graph.units, &graph.params, &graph.values)
        );
        assert_eq!(evaluated.loss_parts.iter().map(|part| part.weight).collect::<Vec<_>>(), [1.0, 0.0]);
        assert!(matches!(evaluated.evaluated(), std::borrow::Cow::Borrowed(_)));
    }
    let kept: Vec<&Value> = cached.inputs.iter().filter(|input| ![ids, log_probs].contains(*input)).collect();
    assert_eq!(cached.evaluated().inputs.iter().collect::<Vec<_>>(), kept);
}

#[test]
fn the_teacher_has_units_of_its_own_and_no_backward() {
    let spec = DistillSpec { beta: 0.0, temperature: 1.0, squared: false };
    let graph = online(spec, 0.25, VOCAB).unwrap();
    let groups: Vec<Group> = graph.units.iter().map(|unit| unit.group).collect();
    assert_eq!(groups, [Group::Teacher, Group::Model]);
    assert_eq!(graph.blocks().count(), 0);
    let parts: Vec<_> = graph.loss_parts.iter().map(|part| (part.name, part.weight)).collect();
    assert_eq!(parts, [("ce_loss", 0.75), ("kd_loss", 0.25)]);
    let backward = graph.backward().unwrap();
    assert_eq!(backward.losses, graph.nodes.last().unwrap().outputs);
    assert!(backward.nodes.iter().all(|node| graph.units[node.unit.index()].group == Group::Model));
}

#[test]
fn what_cannot_be_distilled_is_refused() {
    let spec = DistillSpec { beta: 0.0, temperature: 1.0, squared: false };
    let refusals = [
        (
            online(DistillSpec { beta: 1.5, ..spec }, 0.5, VOCAB),
            "beta should be at least 0 and at most 1, and is 1.5",
        ),
        (online(spec, -0.5, VOCAB), "alpha should be at least 0 and at most 1, and is -0.5"),
        (
            online(DistillSpec { temperature: 0.0, ..spec }, 0.5, VOCAB),
            "the temperature should be above 0 and finite, and is 0",
        ),
        (
            offline(spec, 0.5, [VOCAB + 1, VOCAB], true).map(|(graph, _)| graph),
            "at most the teacher's vocabulary of 7, and is 8",
        ),
    ];
    for (refusal, words) in refusals {
        let error = refusal.unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
    let mut b = Builder::new(&[DATA_ROWS]);
    let error = b.teacher_unit("teacher", specs(&[("teacher.w", &[2, 2])])).unwrap_err().to_string();
    assert_eq!(
        error,
        "the parameter `teacher.w` of the teacher is trained: a teacher's parameters are frozen"
    );
}
