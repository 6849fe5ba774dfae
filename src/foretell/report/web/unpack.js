// The data of the page: one deflated block of a JSON head and the columns it points to.
const TYPES = {
  u1: Uint8Array,
  u2: Uint16Array,
  u4: Uint32Array,
  i4: Int32Array,
  f4: Float32Array,
  f8: Float64Array,
};

async function unpacked(text) {
  const raw = atob(text),
    bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const whole = await new Response(stream).arrayBuffer();
  const length = new DataView(whole).getUint32(0, true);
  const first = Math.ceil((4 + length) / 8) * 8; // columns begin where eight-byte numbers may
  const head = new TextDecoder().decode(new Uint8Array(whole, 4, length));
  return JSON.parse(head, (key, value) =>
    value && value.column
      ? new TYPES[value.column[0]](whole, first + value.column[1], value.column[2])
      : value,
  );
}
