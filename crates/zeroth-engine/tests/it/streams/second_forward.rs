//! A teacher that is the student without its adapters, in the student's own units: no weight is there twice, and each is gathered
//! once for both.

use zeroth_cpu::CpuTarget;
use zeroth_graph::{Builder, DistillSpec, Graph, Group, Role, Teacher, Value};
use zeroth_program::{Action, Compiled, FrozenPlacement, Recompute, Settings};

use super::{HIDDEN, VOCAB, assert_trains, settings, sizes, specs};

const RANK: u64 = 2;

/// A stream that is distilled from the model without adapters, and one with labels alone.
fn model(with_teacher: bool) -> Graph {
    let frozen = |params: &[(&str, &[u64])]| {
        let specs = specs(params).into_iter();
        specs.map(|spec| zeroth_graph::ParamSpec { trainable: false, ..spec }).collect::<Vec<_>>()
    };
    let mut b = Builder::new(&[12, 9]);
    b.unit("embedding", Role::Embedding, frozen(&[("table", &[VOCAB, HIDDEN])])).unwrap();
    let table = b.param("table").unwrap();
    let [mut x, mut y] = [0, 1].map(|stream| b.embedding(b.stream(stream).ids, table).unwrap());
    let mut of_teacher = x;
    for block in 0..3 {
        let name = |part: &str| format!("{block}.{part}");
        let (norm, up, down) = (name("norm"), name("up"), name("down"));
        let (a, base) = (name("a"), name("b"));
        let mut params = frozen(&[(&norm, &[HIDDEN]), (&up, &[HIDDEN, HIDDEN]), (&down, &[HIDDEN, HIDDEN])]);
        params.extend(specs(&[(&a, &[RANK, HIDDEN]), (&base, &[HIDDEN, RANK])]));
        let unit = b.unit(format!("block {block}"), Role::Block(block), params).unwrap();
        let [norm, up, down, a, outer] = [norm, up, down, a, base].map(|name| b.param(&name).unwrap());
        let add = |b: &mut Builder, x: Value, adapted: bool| {
            let x = b.rms_norm(x, norm, 1e-5).unwrap();
            let hidden = b.linear(x, up, None).unwrap();
            let hidden = b.swiglu(hidden, x).unwrap();
            let y = b.linear(hidden, down, None).unwrap();
            if !adapted {
                return y;
            }
            let inner = b.linear(hidden, a, None).unwrap();
            b.linear_add(y, inner, outer, 4.0).unwrap()
        };
        (x, y) = (add(&mut b, x, true), add(&mut b, y, true));
        if with_teacher {
            b.enter(unit, Group::Teacher);
            of_teacher = add(&mut b, of_teacher, false);
        }
    }
    let params = frozen(&[("head", &[VOCAB, HIDDEN]), ("last", &[HIDDEN])]);
    let unit = b.unit("head", Role::Head, params).unwrap();
    let [head, last] = ["head", "last"].map(|name| b.param(name).unwrap());
    // Logits that are large enough for a divergence that f32 can tell from 0.
    let normed = |b: &mut Builder, value: Value| {
        let value = b.rms_norm(value, last, 1e-5).unwrap();
        b.scale(value, 8.0).unwrap()
    };
    [x, y] = [x, y].map(|value| normed(&mut b, value));
    if with_teacher {
        b.enter(unit, Group::Teacher);
        of_teacher = normed(&mut b, of_teacher);
        b.enter(unit, Group::Model);
        let teacher = Teacher::Hidden { x: of_teacher, weight: head };
        let spec = DistillSpec { beta: 0.5, temperature: 1.5, squared: true };
        b.distill_loss(x, head, teacher, spec, 0.4).unwrap();
    } else {
        b.set_loss_part("ce_loss", 0.6);
        b.head_loss(x, head).unwrap();
    }
    b.set_loss_part("ce_loss", 0.6);
    b.head_loss(y, head).unwrap();
    b.finish().unwrap()
}

#[test]
fn a_teacher_in_the_units_of_its_student_trains_as_the_reference_does() {
    let graph = model(true);
    for ranks in [1, 2] {
        for stage in 0..=3 {
            assert_trains(&graph, &settings(stage), ranks, &format!("stage {stage}, {ranks} ranks"));
        }
        let block = Recompute::Block { blocks: None, checkpoints: None, offloaded: true };
        let settings = Settings { recompute: block, frozen: FrozenPlacement::Sharded, ..settings(2) };
        assert_trains(&graph, &settings, ranks, &format!("recomputed, {ranks} ranks"));
    }
}

#[test]
fn it_is_gathered_with_its_student_and_not_evaluated() {
    let of = |graph: Graph| {
        let target = &CpuTarget { threads: 1 };
        let settings = Settings { frozen: FrozenPlacement::Sharded, ..settings(3) };
        Compiled::new(graph, 2, &settings, target, sizes()).unwrap()
    };
    let (with, without) = (of(model(true)), of(model(false)));
    let gathers = |compiled: &Compiled, training: bool| {
        let sections = compiled.program.sections.iter();
        let sections = sections.filter(|section| (Some(section.kind) == eval(compiled)) != training);
        let instructions = sections.flat_map(|section| &section.instructions);
        instructions.filter(|instruction| matches!(instruction.action, Action::AllGather(..))).count()
    };
    for training in [true, false] {
        assert!(gathers(&with, training) > 0);
        assert_eq!(gathers(&with, training), gathers(&without, training), "training: {training}");
    }
    let evaluated = with.graph.evaluated();
    assert_eq!(evaluated.nodes.len(), without.graph.nodes.len());
    assert!(evaluated.nodes.iter().all(|node| node.group == Group::Model));
}

fn eval(compiled: &Compiled) -> Option<zeroth_program::SectionKind> {
    compiled.program.eval().map(|section| compiled.program.sections[section].kind)
}

#[test]
fn a_teacher_that_reads_what_is_trained_is_refused() {
    let mut b = Builder::new(&[4]);
    let unit = b.unit("all", Role::Other, specs(&[("table", &[VOCAB, HIDDEN])])).unwrap();
    b.enter(unit, Group::Teacher);
    let table = b.param("table").unwrap();
    let error = b.embedding(b.ids(), table).unwrap_err().to_string();
    assert_eq!(error, "the parameter `table` of the teacher is trained: a teacher's parameters are frozen");
}
