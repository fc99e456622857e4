//! What a model's author may get wrong is said when it is written, not when it runs; and large models are cheap.

use zeroth_graph::{
    ActivationFn, AttentionOptions, Builder, GraphError, ParamSpec, PositionBuckets, Role, Rotary,
};

fn spec(name: &str, shape: &[u64]) -> ParamSpec {
    ParamSpec { name: name.to_owned(), shape: shape.to_vec(), trainable: true, quantized: false }
}

fn begun() -> Builder {
    let mut b = Builder::new(&[4]);
    b.unit("all", Role::Other, vec![spec("embed", &[10, 8]), spec("w", &[6, 8]), spec("norm", &[8])])
        .unwrap();
    b
}

#[test]
fn shapes_that_do_not_fit_are_named() {
    let mut b = begun();
    let (ids, embed, w, norm) =
        (b.ids(), b.param("embed").unwrap(), b.param("w").unwrap(), b.param("norm").unwrap());
    let x = b.embedding(ids, embed).unwrap();
    let y = b.linear(x, w, None).unwrap();
    for (error, words) in [
        (b.linear(y, w, None).unwrap_err(), "linear in unit `all`: an operand's width should be 8, and is 6"),
        (b.linear(x, norm, None).unwrap_err(), "the weight should be a tensor of 2 dimensions, and is [8]"),
        (b.linear(x, w, Some(norm)).unwrap_err(), "the bias's width should be 6, and is 8"),
        (b.rms_norm(y, norm, 1e-6).unwrap_err(), "the weight's width should be 6, and is 8"),
        (b.embedding(x, embed).unwrap_err(), "an operand's kind should be Index, and is Activation"),
        (b.rope(y, 4).unwrap_err(), "an operand's width should be a multiple of 4 heads, and is 6"),
        (b.rope(y, 2).unwrap_err(), "a head's width should be even, and is 3"),
        (b.rope(x, 2).unwrap_err(), "rope in unit `all` has no rotary embedding: call `rotary` first"),
        (
            b.attention([y, y, y], 3, 2, None, 1.0).unwrap_err(),
            "should be a multiple of the 2 heads of k and v, and is 3",
        ),
        (b.attention([x, y, y], 2, 1, None, 1.0).unwrap_err(), "an operand's width should be 4, and is 6"),
        (b.swiglu(x, y).unwrap_err(), "an operand's width should be 8, and is 6"),
        (b.dropout(x, 1.0).unwrap_err(), "the probability should be at least 0 and below 1, and is 1"),
        (b.head_loss(y, embed).unwrap_err(), "an operand's width should be 8, and is 6"),
        (b.param("absent").unwrap_err(), "no unit declares a parameter `absent`"),
    ] {
        assert!(error.to_string().contains(words), "{error}");
    }
    b.rotary(Rotary { frequencies: vec![1.0], scale: 1.0, dynamic: None });
    let error = b.head_norm_rope(x, norm, 2, 1e-6).unwrap_err().to_string();
    assert!(error.contains("the number of rotary frequencies should be 2, and is 1"), "{error}");
}

#[test]
fn biases_and_masks_that_do_not_fit_are_named() {
    let mut b = begun();
    let table = spec("bias", &[4, 2]);
    b.unit("positions", Role::Other, vec![table]).unwrap();
    let (ids, embed, weight) = (b.ids(), b.param("embed").unwrap(), b.param("bias").unwrap());
    let x = b.embedding(ids, embed).unwrap();
    let buckets = PositionBuckets { buckets: 4, max_distance: 3, bidirectional: false };
    let bias = b.position_bias(weight, buckets).unwrap();
    let options =
        AttentionOptions { heads: 2, kv_heads: 2, window: None, scale: 1.0, causal: false, dropout: 0.0 };
    let four = AttentionOptions { heads: 4, kv_heads: 4, ..options };
    let window = AttentionOptions { window: Some(3), ..options };
    let all = AttentionOptions { dropout: 1.0, ..options };
    let near = PositionBuckets { max_distance: 2, ..buckets };
    let few = PositionBuckets { buckets: 8, ..buckets };
    for (error, words) in [
        (b.position_bias(weight, few).unwrap_err(), "the weight's buckets should be 8, and is 4"),
        (
            b.position_bias(weight, near).unwrap_err(),
            "should be above 2, the distances with a bucket of their own",
        ),
        (
            b.attention_with([x; 3], Some(bias), four).unwrap_err(),
            "the biases should be [4 heads, an odd number of distances], and is Fixed(2), 7 wide",
        ),
        (
            b.attention_with([x; 3], Some(x), options).unwrap_err(),
            "kind should be Statistic, and is Activation",
        ),
        (
            b.attention_with([x; 3], None, window).unwrap_err(),
            "what a sliding window is of should be causal attention, and is attention to all keys",
        ),
        (b.attention_with([x; 3], None, all).unwrap_err(), "at least 0 and below 1, and is 1"),
        (b.activation(ActivationFn::Relu, bias).unwrap_err(), "should be Activation, and is Statistic"),
        (b.scale(x, f64::NAN).unwrap_err(), "the factor should be a finite number, and is NaN"),
    ] {
        assert!(error.to_string().contains(words), "{error}");
    }
}

#[test]
fn a_parameter_of_two_units_must_be_a_unit_of_its_own() {
    let mut b = begun();
    let error = b.unit("head", Role::Head, vec![spec("embed", &[10, 8])]).unwrap_err();
    let expected = GraphError::ParamTwice {
        name: "embed".to_owned(),
        first: "all".to_owned(),
        second: "head".to_owned(),
    };
    assert_eq!(error, expected);
}

#[test]
fn a_forward_has_a_loss_and_no_dead_ends() {
    assert_eq!(begun().finish().unwrap_err(), GraphError::NoLoss);
    let mut b = begun();
    let (ids, embed, w) = (b.ids(), b.param("embed").unwrap(), b.param("w").unwrap());
    let x = b.embedding(ids, embed).unwrap();
    b.linear(x, w, None).unwrap();
    b.head_loss(x, embed).unwrap();
    assert_eq!(b.finish().unwrap_err(), GraphError::DeadEnd { op: "linear", unit: "all".to_owned() });
}

#[test]
fn an_op_needs_a_unit() {
    let mut b = Builder::new(&[4]);
    let labels = b.stream(0).labels;
    assert_eq!(
        b.swiglu(labels, labels).unwrap_err().to_string().split(':').next(),
        Some("swiglu in unit ``")
    );
    b.unit("only", Role::Other, vec![spec("embed", &[3, 2])]).unwrap();
    assert!(b.param("embed").is_ok());
}

#[test]
fn flats_count_trained_and_frozen_parameters_apart() {
    let mut b = Builder::new(&[4]);
    let mut frozen = spec("base", &[6, 8]);
    frozen.trainable = false;
    let unit = b.unit("all", Role::Other, vec![spec("embed", &[10, 8]), frozen]).unwrap();
    let (ids, embed, base) = (b.ids(), b.param("embed").unwrap(), b.param("base").unwrap());
    let x = b.embedding(ids, embed).unwrap();
    let y = b.linear(x, base, None).unwrap();
    b.head_loss(y, base).unwrap_err();
    b.swiglu(y, y).unwrap();
    b.head_loss(x, embed).unwrap();
    assert!(b.finish().is_err(), "the swiglu leads nowhere");
    let mut b = Builder::new(&[4]);
    let again = b.unit("all", Role::Other, vec![spec("embed", &[10, 8])]).unwrap();
    assert_eq!(again, unit);
    let (ids, embed) = (b.ids(), b.param("embed").unwrap());
    let x = b.embedding(ids, embed).unwrap();
    b.head_loss(x, embed).unwrap();
    b.finish().unwrap();
}
