/** Pictures to tensors and back. */

const MEAN = [0.485, 0.456, 0.406];
const DEVIATION = [0.229, 0.224, 0.225];
/** How pixels of 0 to 255 become values: in this page and, as text, in Python. */
export const SCALES = {
	"0 to 1": [(value) => value / 255, "pixels / 255"],
	"0 to 255": [(value) => value, "pixels"],
	"-1 to 1": [(value) => value / 127.5 - 1, "pixels / 127.5 - 1"],
	ImageNet: [(value, channel) => (value / 255 - MEAN[channel]) / DEVIATION[channel], `(pixels / 255 - [${MEAN}]) / [${DEVIATION}]`],
};

/** How a tensor of this shape holds a picture: {planes, channels, height, width}, or null. -1: any size. */
export function imageLayout(shape, format) {
	const dims = shape.slice(Math.abs(shape[0]) === 1 && shape.length > 2 ? 1 : 0);
	const fits = (channels, ...sides) => [1, 3, 4].includes(channels) && sides.every((side) => side === -1 || side >= 8);
	const [a, b, c] = dims;
	if (dims.length === 2 && fits(1, a, b) && shape.length > 2) return { planes: true, channels: 1, height: a, width: b };
	if (dims.length !== 3) return shape.length === 3 && dims.length === 2 && shape[0] === -1 && fits(b, shape[0], a)
		? { planes: false, channels: b, height: -1, width: a } : null;
	if (format !== "FORMAT_NHWC" && fits(a, b, c)) return { planes: true, channels: a, height: b, width: c };
	return fits(c, a, b) ? { planes: false, channels: c, height: a, width: b } : null;
}

/** The shape of a picture in a tensor that may have a batch dimension. */
export function imageShape(shape, { planes, channels }, { height, width }) {
	const sides = planes ? [channels, height, width] : [height, width, channels];
	const rest = shape.length - sides.length;
	return rest < 0 ? [height, width] : [...Array(rest).fill(1), ...sides].slice(-shape.length);
}

/** Draws a file on the canvas, with the size and the cut of `options`, and returns the values of the tensor. */
export async function imageValues(file, { planes, channels }, { width, height, crop, scale, bgr }, canvas) {
	const bitmap = await createImageBitmap(file).catch(() => {
		throw new Error(`${file.name} is not a picture that this browser can read`);
	});
	Object.assign(canvas, { width, height });
	const context = canvas.getContext("2d", { willReadFrequently: true });
	context.imageSmoothingQuality = "high";
	const shrink = Math.min(bitmap.width / width, bitmap.height / height);
	const [w, h] = crop ? [width * shrink, height * shrink] : [bitmap.width, bitmap.height];
	context.drawImage(bitmap, (bitmap.width - w) / 2, (bitmap.height - h) / 2, w, h, 0, 0, width, height);
	const { data } = context.getImageData(0, 0, width, height);
	const area = width * height;
	const values = new Float32Array(area * channels);
	for (let at = 0; at < area; at += 1) {
		const [red, green, blue, alpha] = data.subarray(4 * at, 4 * at + 4);
		const pixel = channels === 1 ? [0.299 * red + 0.587 * green + 0.114 * blue] : bgr ? [blue, green, red, alpha] : [red, green, blue, alpha];
		for (let channel = 0; channel < channels; channel += 1) {
			values[planes ? channel * area + at : at * channels + channel] = SCALES[scale][0](pixel[channel], channel % 3);
		}
	}
	return values;
}

/** Draws the first picture of a tensor. Values outside of 0 to 1, or of 0 to 255 for integers, are scaled into it. */
export function drawTensor(values, datatype, { planes, channels, height, width }, canvas) {
	Object.assign(canvas, { width, height });
	const area = width * height;
	const pixels = values.slice(0, area * channels).map(Number);
	const low = pixels.reduce((least, value) => Math.min(least, value), 0);
	const high = pixels.reduce((most, value) => Math.max(most, value), datatype === "UINT8" ? 255 : 1);
	const context = canvas.getContext("2d");
	const picture = context.createImageData(width, height);
	for (let at = 0; at < area; at += 1) {
		for (let channel = 0; channel < 4; channel += 1) {
			const from = channels < 3 ? 0 : channel;
			const value = channel === 3 && channels < 4 ? high : pixels[planes ? from * area + at : at * channels + from];
			picture.data[4 * at + channel] = (value - low) / (high - low) * 255;
		}
	}
	context.putImageData(picture, 0, 0);
}
