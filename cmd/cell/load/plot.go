// SPDX-License-Identifier: Apache-2.0

package load

import (
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
)

// Measures of the plot, in pixels.
const (
	panelWidth, panelHeight     = 380, 260
	panelLeft, panelTop         = 60, 40
	panelGap, panelBottom, side = 70, 70, 20
)

var lineColours = []string{"#1b6ca8", "#d1495b", "#3c7d3c", "#8a5a00", "#6b4fa0"}

// WriteSVG draws the pauses that clients see, a panel for each store: the tenant's rows
// from left to right, milliseconds upwards, both in powers of ten, a line of the 95th
// percentile for each rate of writes, with a bar from the 50th to the longest.
func (m *PauseMatrix) WriteSVG(w io.Writer) error {
	var b strings.Builder
	stores, rows, rates := m.axes()
	low, high := 0.0, 1.0 // powers of ten of milliseconds
	for _, c := range m.Cells {
		if len(c.Clients) == 0 {
			continue
		}
		low = min(low, math.Floor(log10ms(c, 50)))
		high = max(high, math.Ceil(log10ms(c, 100)))
	}
	width := panelLeft + len(stores)*(panelWidth+panelGap) - panelGap + side
	height := panelTop + panelHeight + panelBottom
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" font-family="sans-serif" font-size="12">`+"\n", width, height)
	fmt.Fprintf(&b, `<rect width="%d" height="%d" fill="white"/>`+"\n", width, height)
	first, last := math.Log10(float64(rows[0])), math.Log10(float64(rows[len(rows)-1]))
	for p, store := range stores {
		left := float64(panelLeft + p*(panelWidth+panelGap))
		x := func(n int) float64 {
			if first == last {
				return left + panelWidth/2
			}
			return left + 20 + (math.Log10(float64(n))-first)/(last-first)*(panelWidth-40)
		}
		y := func(power float64) float64 {
			return panelTop + panelHeight*(1-(power-low)/(high-low))
		}
		fmt.Fprintf(&b, `<text x="%.0f" y="%d" font-size="14">%s: pause as clients see it, ms</text>`+"\n", left, panelTop-15, store)
		for power := low; power <= high; power++ {
			fmt.Fprintf(&b, `<line x1="%.0f" y1="%.1f" x2="%.0f" y2="%.1f" stroke="#ddd"/><text x="%.0f" y="%.1f" text-anchor="end">%g</text>`+"\n",
				left, y(power), left+panelWidth, y(power), left-6, y(power)+4, math.Pow(10, power))
		}
		for _, n := range rows {
			fmt.Fprintf(&b, `<text x="%.1f" y="%d" text-anchor="middle">%s</text>`+"\n", x(n), panelTop+panelHeight+18, fmt.Sprintf("%d rows", n))
		}
		for i, rate := range rates {
			colour, shift := lineColours[i%len(lineColours)], float64(i-len(rates)/2)*7
			var points []string
			for _, c := range m.Cells {
				if c.Store != store || c.Rate != rate || len(c.Clients) == 0 {
					continue
				}
				at := x(c.Rows) + shift
				points = append(points, fmt.Sprintf("%.1f,%.1f", at, y(log10ms(c, 95))))
				fmt.Fprintf(&b, `<line x1="%.1f" y1="%.1f" x2="%.1f" y2="%.1f" stroke="%s" stroke-opacity="0.4" stroke-width="4"/>`+"\n", at, y(log10ms(c, 50)), at, y(log10ms(c, 100)), colour)
				fmt.Fprintf(&b, `<circle cx="%.1f" cy="%.1f" r="4" fill="%s"/>`+"\n", at, y(log10ms(c, 95)), colour)
			}
			fmt.Fprintf(&b, `<polyline points="%s" fill="none" stroke="%s" stroke-width="1.5"/>`+"\n", strings.Join(points, " "), colour)
			fmt.Fprintf(&b, `<text x="%.0f" y="%d" fill="%s">%s writes/s</text>`+"\n", left+float64(i)*panelWidth/float64(len(rates)), panelTop+panelHeight+40, colour, RateName(rate))
		}
	}
	fmt.Fprintf(&b, `<text x="%d" y="%d" fill="#555">points: p95; bars: p50 to the longest</text>`+"\n</svg>\n", panelLeft, height-10)
	_, err := io.WriteString(w, b.String())
	return err
}

func log10ms(c PauseCell, p int) float64 {
	return math.Log10(max(float64(Percentile(c.Clients, p).Microseconds())/1000, 0.1))
}

// axes are what the matrix has: stores as they came, sizes in order, rates as they came.
func (m *PauseMatrix) axes() (stores []string, rows []int, rates []float64) {
	for _, c := range m.Cells {
		if !slices.Contains(stores, c.Store) {
			stores = append(stores, c.Store)
		}
		if !slices.Contains(rows, c.Rows) {
			rows = append(rows, c.Rows)
		}
		if !slices.Contains(rates, c.Rate) {
			rates = append(rates, c.Rate)
		}
	}
	slices.Sort(rows)
	return stores, rows, rates
}
