/** Pictures to tensors and back. */

import {product} from "./tensors.js"

const MEAN = [0.485, 0.456, 0.406]
const DEVIATION = [0.229, 0.224, 0.225]
export const SCALES = {
	"0 to 1": [value => value / 255, "pixels / 255"],
	"0 to 255": [value => value, "pixels"],
	"-1 to 1": [value => value / 127.5 - 1, "pixels / 127.5 - 1"],
	ImageNet: [(value, channel) => (value / 255 - MEAN[channel]) / DEVIATION[channel], `(pixels / 255 - [${MEAN}]) / [${DEVIATION}]`],
}

/** How a tensor of this shape holds a picture: {planes, channels, height, width}, or null. -1: any size. */
export function imageLayout(shape, format) {
	const fits = (channels, ...sides) => [1, 3, 4].includes(channels) && sides.every(side => side === -1 || side >= 8)
	const [a, b, c] = shape.slice(-3)
	if (shape.length < 3 || product(shape.slice(0, -3)) ** 2 !== 1) return null
	if (format !== "FORMAT_NHWC" && fits(Math.abs(a), b, c)) return {planes: true, channels: Math.abs(a), height: b, width: c}
	return fits(c, a, b) ? {planes: false, channels: c, height: a, width: b} : null
}

export async function imageValues(file, {width, height, scale, layout: {planes, channels}}, canvas) {
	const bitmap = await createImageBitmap(file)
	Object.assign(canvas, {width, height})
	const context = canvas.getContext("2d", {willReadFrequently: true})
	context.imageSmoothingQuality = "high"
	context.drawImage(bitmap, 0, 0, width, height)
	const {data} = context.getImageData(0, 0, width, height)
	const area = width * height
	const values = new Float32Array(area * channels)
	for (let at = 0; at < area; at += 1) {
		const pixel = data.subarray(4 * at, 4 * at + 4)
		if (channels === 1) pixel[0] = 0.299 * pixel[0] + 0.587 * pixel[1] + 0.114 * pixel[2]
		for (let channel = 0; channel < channels; channel += 1) {
			values[planes ? channel * area + at : at * channels + channel] = SCALES[scale][0](pixel[channel], channel % 3)
		}
	}
	return values
}

/** Draws the first picture of a tensor. Values outside of 0 to 1, or of 0 to 255 for UINT8, are scaled into that. */
export function drawTensor(values, datatype, {planes, channels, height, width}, canvas) {
	Object.assign(canvas, {width, height})
	const area = width * height
	const pixels = values.slice(0, area * channels).map(Number)
	const low = pixels.reduce((lowest, value) => Math.min(lowest, value), 0)
	const high = pixels.reduce((highest, value) => Math.max(highest, value), datatype === "UINT8" ? 255 : 1)
	const picture = new ImageData(width, height)
	picture.data.forEach((_, index) => {
		const at = index >> 2
		const channel = channels < 3 ? 0 : index & 3
		const value = (index & 3) === 3 && channels < 4 ? high : pixels[planes ? channel * area + at : at * channels + channel]
		picture.data[index] = (value - low) / (high - low) * 255
	})
	canvas.getContext("2d").putImageData(picture, 0, 0)
}
