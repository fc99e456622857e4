//! Routing and experts in every layout and split: grouped matmuls have the bits of one `linear` for each expert, and rows of
//! padding are neither read nor written.

use half::{bf16, f16};
use zeroth_base::{ActivationFn, name_key};
use zeroth_cpu::*;
use zeroth_kernel::*;

fn random<T: Element>(name: &str, count: usize) -> Vec<T> {
    let mut values = vec![T::default(); count];
    normal(&Pool::new(1), 8, name_key(name), 0, 1.0, &mut values);
    values
}

fn bits<T: Element>(values: &[T]) -> Vec<u32> {
    values.iter().map(|value| value.to_f32().to_bits()).collect()
}

fn pools() -> impl Iterator<Item = Pool> {
    let on = |isa: Isa| [1, 3].map(|threads| Pool::on_isa(threads, isa).unwrap());
    Isa::available().iter().flat_map(move |isa| on(*isa))
}

/// Rows [count, width] that are `stride` apart, with NaN between them and in the rows from `end` on.
fn padded<T: Element>(name: &str, [count, width, stride]: [usize; 3], end: usize) -> Vec<T> {
    let mut values = random::<T>(name, count * stride);
    for (row, values) in values.chunks_exact_mut(stride).enumerate() {
        values[if row < end { width } else { 0 }..].fill(T::from_f32(f32::NAN));
    }
    values
}

/// A copy that begins `shift` elements behind a cache line. AMX reads rows in place if they begin at one.
fn placed<'a, T: Element>(values: &[T], shift: usize, buffer: &'a mut Vec<T>) -> &'a [T] {
    buffer.resize(values.len() + 64, T::default());
    let first = buffer.as_ptr().align_offset(64) + shift;
    let copy = &mut buffer[first..][..values.len()];
    copy.copy_from_slice(values);
    copy
}

/// The offsets of experts with these many rows.
fn offsets(rows: &[i32]) -> Vec<i32> {
    let mut end = 0;
    let ends = rows.iter().map(|rows| {
        end += rows;
        end
    });
    [0].into_iter().chain(ends).collect()
}

fn check_groups<T: Element>(pool: &Pool, rows: &[i32], [inputs, outputs]: [usize; 2]) {
    let (experts, offsets) = (rows.len(), offsets(rows));
    let routed = offsets[experts] as usize;
    let slots = routed + 5;
    let case = format!("{}, {} threads, {}, {rows:?}", pool.isa(), pool.threads(), T::DTYPE);
    let [x_stride, y_stride] = [inputs.next_multiple_of(32) + 32, outputs + 3];
    let dims =
        GroupedLinearDims { x_stride, y_stride, ..GroupedLinearDims::new(slots, experts, inputs, outputs) };
    let x = padded::<T>("x", [slots, inputs, x_stride], routed);
    let dy = padded::<T>("dy", [slots, outputs, y_stride], routed);
    let (w, mut w_at_line) = (random::<T>("w", experts * outputs * inputs), Vec::new());
    let w = placed(&w, 0, &mut w_at_line);
    let before: Vec<f32> = random("before", w.len());
    let [mut at_line, mut behind] = [Vec::new(), Vec::new()];
    let (in_place, packed) = (placed(&x, 0, &mut at_line), placed(&x, 1, &mut behind));
    let mut scratch = vec![f32::NAN; grouped_linear_scratch(dims, pool.threads())];
    let (mut y, mut sum, mut dx, mut more) = (dy.clone(), dy.clone(), x.clone(), x.clone());
    let (mut dw, mut rounded) = (before.clone(), vec![T::from_f32(f32::NAN); w.len()]);
    grouped_linear(pool, dims, &offsets, in_place, w, &mut y, &mut scratch);
    grouped_linear_add(pool, dims, 0.3, &offsets, &x, w, &mut sum, &mut scratch);
    grouped_linear_dx(pool, dims, 0.3, &offsets, &dy, w, &mut dx, false, &mut scratch);
    grouped_linear_dx(pool, dims, 0.3, &offsets, &dy, w, &mut more, true, &mut scratch);
    grouped_linear_dw(pool, dims, 0.3, &offsets, &dy, &x, &mut dw, &mut scratch);
    let infinite = grouped_linear_dw_rounded(pool, dims, 0.3, &offsets, &dy, &x, &mut rounded, &mut scratch);
    assert!(!infinite, "{case}");

    // The same by experts, in place. Padding stays as it was.
    let (mut y1, mut sum1, mut dx1, mut more1) = (dy.clone(), dy.clone(), x.clone(), x.clone());
    let (mut dw1, mut rounded1) = (before, vec![T::from_f32(f32::NAN); w.len()]);
    for expert in 0..experts {
        let [first, end] = [offsets[expert], offsets[expert + 1]].map(|offset| offset as usize);
        let own = LinearDims { x_stride, y_stride, ..LinearDims::new(end - first, inputs, outputs) };
        let (xs, ys) = (first * x_stride..end * x_stride, first * y_stride..end * y_stride);
        let ws = expert * outputs * inputs..(expert + 1) * outputs * inputs;
        let mut scratch = vec![f32::NAN; linear_scratch(own, pool.threads())];
        let (s, w, x, dy) = (&mut scratch[..], &w[ws.clone()], &packed[xs.clone()], &dy[ys.clone()]);
        linear(pool, own, x, w, None, &mut y1[ys.clone()], s);
        linear_add(pool, own, 0.3, x, w, &mut sum1[ys], s);
        linear_dx(pool, own, 0.3, dy, w, &mut dx1[xs.clone()], false, s);
        linear_dx(pool, own, 0.3, dy, w, &mut more1[xs], true, s);
        linear_dw(pool, own, 0.3, dy, x, &mut dw1[ws.clone()], s);
        linear_dw_rounded(pool, own, 0.3, dy, x, &mut rounded1[ws], s);
    }
    assert!(bits(&y) == bits(&y1), "{case}: y");
    assert!(bits(&sum) == bits(&sum1), "{case}: y added");
    assert!(bits(&dx) == bits(&dx1), "{case}: dx");
    assert!(bits(&more) == bits(&more1), "{case}: dx added");
    assert!(bits(&dw) == bits(&dw1), "{case}: dw");
    assert!(bits(&rounded) == bits(&rounded1), "{case}: dw rounded");
}

#[test]
fn grouped_matmuls_have_the_bits_of_one_matmul_for_each_expert() {
    let few: Vec<i32> = (0..150).map(|expert| expert % 4).collect();
    let splits: [&[i32]; 6] = [&[33; 4], &[0, 0, 150, 0], &few, &[0; 7], &[1], &[64, 0, 5, 1, 0]];
    for pool in pools() {
        for rows in splits {
            check_groups::<f32>(&pool, rows, [40, 33]);
            check_groups::<bf16>(&pool, rows, [40, 33]);
            check_groups::<f16>(&pool, rows, [40, 33]);
        }
        // Whole tiles, rows read in place, and an adapter in both directions.
        for sides in [[64, 96], [96, 150], [3, 40], [40, 3]] {
            check_groups::<f32>(&pool, splits[0], sides);
            check_groups::<bf16>(&pool, splits[0], sides);
            check_groups::<bf16>(&pool, splits[5], sides);
        }
    }
    // Sums of several blocks of k, in y and in dw; weights read in place, in one block of k and in several.
    for pool in pools() {
        check_groups::<bf16>(&pool, &[3, 1100], [1100, 40]);
        check_groups::<bf16>(&pool, &[0, 1, 70, 33], [320, 100]);
        check_groups::<bf16>(&pool, &[40, 3], [2400, 75]);
    }
}

/// Everything that a route writes: experts, order, places, offsets; weights, balance.
struct Route {
    indices: [Vec<i32>; 4],
    weights: Vec<f32>,
    balance: Vec<f32>,
}

fn route_of<T: Element>(pool: &Pool, dims: RouteDims, starts: Option<&[u32]>, logits: &[T]) -> Route {
    let (slots, experts) = (dims.slots(), dims.experts);
    let mut indices = [slots, slots, slots, experts + 1].map(|count| vec![-7; count]);
    let (mut weights, mut balance) = (vec![f32::NAN; slots], vec![f32::NAN; 2 * experts]);
    let [chosen, order, places, offsets] = indices.each_mut().map(|numbers| &mut numbers[..]);
    let routed = RoutedSlices { experts: chosen, weights: &mut weights, order, places, offsets };
    let mut scratch = vec![f32::NAN; route_scratch(dims, pool.threads())];
    let sums = Some(BalanceSlices { before: None, after: &mut balance });
    route(pool, dims, starts, logits, routed, sums, &mut scratch);
    Route { indices, weights, balance }
}

#[test]
fn odd_logits_route_to_valid_experts() {
    let (nan, infinite) = (f32::NAN, f32::INFINITY);
    let rows: [([f32; 4], [i32; 2]); 8] = [
        ([0.5, 2.0, -1.0, 1.0], [1, 3]),
        ([1.0, 1.0, 1.0, 1.0], [0, 1]),
        ([0.0, -0.0, 0.0, -1.0], [0, 1]),
        ([nan, nan, nan, nan], [0, 1]),
        ([nan, -infinite, 1.0, nan], [2, 1]),
        ([nan, nan, nan, -infinite], [3, 0]),
        ([infinite, infinite, -infinite, 0.0], [0, 1]),
        ([-infinite; 4], [0, 1]),
    ];
    let logits: Vec<f32> = rows.iter().flat_map(|(logits, _)| *logits).collect();
    let expected: Vec<i32> = rows.iter().flat_map(|(_, chosen)| *chosen).collect();
    for pool in pools() {
        for normalized in [false, true] {
            let dims = RouteDims::new(rows.len(), 4, 2, normalized);
            let Route { indices: [experts, order, places, offsets], weights, .. } =
                route_of(&pool, dims, None, &logits);
            assert_eq!(experts, expected, "{}", pool.isa());
            assert!(order.iter().enumerate().all(|(place, slot)| places[*slot as usize] == place as i32));
            assert_eq!(offsets, [0, 6, 13, 14, 16], "{order:?}");
            assert!(weights[..6].iter().all(|weight| weight.is_finite()), "{weights:?}");
            assert!(weights[6..].iter().all(|weight| weight.is_nan()), "{weights:?}");
            let mut dlogits = vec![0.5f32; logits.len()];
            let mut scratch = vec![f32::NAN; route_backward_scratch(dims, pool.threads())];
            let (slopes, d) = (vec![1.0; 8], vec![1.0; 16]);
            let (d, slopes) = (Some(&d[..]), Some(&slopes[..]));
            route_backward(
                &pool,
                dims,
                None,
                &logits,
                &experts,
                &weights,
                d,
                slopes,
                &mut dlogits,
                &mut scratch,
            );
            assert!(dlogits[..12].iter().all(|dlogit| dlogit.is_finite()), "{dlogits:?}");
        }
    }
}

#[test]
fn a_route_without_routed_rows_sorts_padding() {
    let pool = Pool::new(2);
    let dims = RouteDims::new(3, 5, 2, true);
    for starts in [&[][..], &[0]] {
        let found = route_of(&pool, dims, Some(starts), &random::<f32>("logits", 15));
        assert_eq!(found.indices, [vec![5; 6], (0..6).collect(), (0..6).collect(), vec![0; 6]]);
        assert_eq!((found.weights, found.balance), (vec![0.0; 6], vec![0.0; 10]));
    }
    let balance = BalanceDims { rows: 3, experts: 5, layers: 2 };
    let mut slopes = [f32::NAN; 10];
    assert_eq!(balance_loss_backward(balance, &[0], &[0.0; 10], &[-100; 3], 1.0, &mut slopes), 0.0);
    assert_eq!(slopes, [0.0; 10]);
}

fn check_strides<T: Element>(pool: &Pool) {
    let (rows, experts, k, width) = (37, 6, 2, 40);
    let (slots, starts) = (rows * k, [0u32, 30]);
    let case = format!("{}, {} threads, {}", pool.isa(), pool.threads(), T::DTYPE);
    let logits = random::<T>("logits", rows * experts);
    let dims = RouteDims::new(rows, experts, k, true);
    let apart = RouteDims { row_stride: experts + 3, ..dims };
    let spread = |values: &[T], width: usize, stride: usize| {
        let between = vec![T::from_f32(f32::NAN); stride - width];
        values.chunks_exact(width).flat_map(|row| [row, &between].concat()).collect::<Vec<T>>()
    };
    let found = route_of(pool, apart, Some(&starts), &spread(&logits, experts, experts + 3));
    let Route { indices: [chosen, order, places, offsets], weights, balance } =
        route_of(pool, dims, Some(&starts), &logits);
    let expected = [chosen, order.clone(), places.clone(), offsets.clone()];
    assert!(found.indices == expected && bits(&found.weights) == bits(&weights), "{case}");
    assert_eq!(bits(&found.balance), bits(&balance), "{case}");
    let routed = offsets[experts] as usize;
    assert_eq!(routed, 60);

    // Contiguous rows, and rows apart with NaN between and in padding.
    let x = random::<T>("x", rows * width);
    let close = ExpertRowsDims::new(rows, experts, k, width);
    let wide = ExpertRowsDims { row_stride: width + 5, ..close };
    let [near, far] = [(close, x.clone()), (wide, spread(&x, width, width + 5))].map(|(dims, x)| {
        let stride = dims.row_stride;
        let mut gathered = vec![T::from_f32(f32::NAN); slots * stride];
        gather_rows(pool, dims, &order, &offsets, &x, &mut gathered);
        assert!(gathered[routed * stride..].iter().all(|x| x.to_f32().is_nan()), "{case}: padding is kept");
        let mut combined = vec![T::from_f32(f32::NAN); rows * stride];
        combine_rows(pool, dims, &places, &offsets, &gathered, &mut combined);
        combined.chunks_exact(stride).flat_map(|row| bits(&row[..width])).collect::<Vec<u32>>()
    });
    assert!(near == far, "{case}");
    let doubled = x.iter().map(|x| T::from_f32(2.0 * x.to_f32())).collect::<Vec<T>>();
    assert_eq!(near[..30 * width], bits(&doubled)[..30 * width], "{case}: k copies of each row");
    assert!(near[30 * width..].iter().all(|bits| *bits == 0), "{case}: zeros in padding");

    let gate_up = padded::<T>("gate_up", [slots, 2 * width, 2 * width + 6], routed);
    let dy = padded::<T>("dy", [slots, width, width + 2], routed);
    let close = GatedRowsDims::new(rows, experts, k, width);
    let far = GatedRowsDims { gate_up_stride: 2 * width + 6, y_stride: width + 2, ..close };
    let packed = |values: &[T], width: usize, stride: usize| {
        values.chunks_exact(stride).flat_map(|row| row[..width].to_vec()).collect::<Vec<T>>()
    };
    let near = (close, packed(&gate_up, 2 * width, 2 * width + 6), packed(&dy, width, width + 2));
    let [near, far] = [near, (far, gate_up, dy)].map(|(dims, gate_up, dy)| {
        let mut y = vec![T::from_f32(f32::NAN); dy.len()];
        let mut dgate_up = vec![T::from_f32(f32::NAN); gate_up.len()];
        let (mut dweights, mut scratch) = (vec![f32::NAN; slots], vec![f32::NAN; gated_rows_scratch(dims)]);
        let (f, of_weights) = (ActivationFn::GeluTanh, Some(&mut dweights[..]));
        gated_rows(pool, f, dims, &order, &offsets, &weights, &gate_up, &mut y);
        let (d, s) = (&mut dgate_up[..], &mut scratch[..]);
        gated_rows_backward(pool, f, dims, &order, &offsets, &weights, &gate_up, &dy, d, of_weights, s);
        let rows = |values: &[T], width: usize, stride: usize| bits(&packed(values, width, stride));
        let all = [rows(&y, width, dims.y_stride), rows(&dgate_up, 2 * width, dims.gate_up_stride)].concat();
        [all, bits(&dweights)].concat()
    });
    assert!(near == far, "{case}");
}

#[test]
fn rows_apart_have_the_bits_of_contiguous_rows() {
    for pool in pools() {
        check_strides::<f32>(&pool);
        check_strides::<bf16>(&pool);
        check_strides::<f16>(&pool);
    }
}
