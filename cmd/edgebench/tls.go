// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"math/big"
	"net"
	"os"
	"strconv"
	"time"
)

// certificate makes an ECDSA P-256 certificate that signs itself.
func (b *bench) certificate() error {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "api.example.com"}, DNSNames: []string{"api.example.com"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour), KeyUsage: x509.KeyUsageDigitalSignature,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return err
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return err
	}
	if b.cert, err = b.write("cert.pem", string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))); err != nil {
		return err
	}
	b.key, err = b.write("key.pem", string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: keyDER})))
	return err
}

// pem is both in one file.
func (b *bench) pem() (string, error) {
	cert, err := os.ReadFile(b.cert)
	if err != nil {
		return "", err
	}
	key, err := os.ReadFile(b.key)
	if err != nil {
		return "", err
	}
	return b.write("both.pem", string(cert)+string(key))
}

func (b *bench) tlsCases() []testCase {
	requests := requestsOf("GET", pathSmall, 0)
	connect := func(each bool) func(context.Context, *peer) (runner, error) {
		return func(_ context.Context, p *peer) (runner, error) {
			pool := x509.NewCertPool()
			cert, err := os.ReadFile(b.cert)
			if err != nil {
				return nil, err
			}
			if !pool.AppendCertsFromPEM(cert) {
				return nil, errors.New("the certificate cannot be read")
			}
			cfg := &tls.Config{RootCAs: pool, ServerName: "api.example.com", MinVersion: tls.VersionTLS13, CurvePreferences: []tls.CurveID{tls.X25519}, NextProtos: []string{"http/1.1"}}
			conns := b.opt.conns
			if each {
				conns = min(conns, 16) // so that it is not the generator's queue that is measured
			}
			l := &tlsLoad{addr: "127.0.0.1:" + strconv.Itoa(p.tls), cfg: cfg, requests: requests, conns: make([]*tls.Conn, conns), each: each}
			return l, nil
		}
	}
	return []testCase{
		{name: "tls-get-200", share: 1, connect: connect(false)},
		{name: "tls-handshake", share: 0.1, connect: connect(true)},
	}
}

// tlsLoad asks for 200 bytes over TLS 1.3, on kept connections, or on a new one for
// each request.
type tlsLoad struct {
	addr     string
	cfg      *tls.Config
	requests [][]byte
	conns    []*tls.Conn
	each     bool
}

func (l *tlsLoad) close() {
	for _, c := range l.conns {
		if c != nil {
			_ = c.Close()
		}
	}
}

func (l *tlsLoad) run(n int) (*loadResult, error) {
	bufs := make([][]byte, len(l.conns))
	for i := range bufs {
		bufs[i] = make([]byte, 4<<10)
	}
	return timed(len(l.conns), n, func(i, k int) error { return l.one(i, k, bufs[i]) })
}

// one sends the k-th request on the i-th connection.
func (l *tlsLoad) one(i, k int, buf []byte) error {
	if l.conns[i] == nil {
		raw, err := net.Dial("tcp", l.addr)
		if err != nil {
			return err
		}
		c := tls.Client(raw, l.cfg)
		l.conns[i] = c
		if err := c.SetDeadline(time.Now().Add(5 * time.Minute)); err != nil {
			return err
		}
		if err := c.Handshake(); err != nil {
			return err
		}
		if s := c.ConnectionState(); s.CipherSuite != tls.TLS_AES_128_GCM_SHA256 || s.Version != tls.VersionTLS13 || s.DidResume {
			return fmt.Errorf("not the TLS that is to be measured: %s, resumed %v", tls.CipherSuiteName(s.CipherSuite), s.DidResume)
		}
	}
	c := l.conns[i]
	if _, err := c.Write(l.requests[k%len(l.requests)]); err != nil {
		return err
	}
	for have := 0; ; {
		m, err := c.Read(buf[have:])
		if err != nil {
			return fmt.Errorf("reading an answer: %w", err)
		}
		have += m
		end := bytes.Index(buf[:have], []byte("\r\n\r\n"))
		if end < 0 {
			continue
		}
		length, err := checkHead(buf[:end+2])
		if err != nil {
			return err
		}
		if length != smallBytes || have > end+4+length {
			return fmt.Errorf("an answer of %d bytes, want %d", length, smallBytes)
		}
		if have == end+4+length {
			break
		}
	}
	if !l.each {
		return nil
	}
	l.conns[i] = nil
	if err := c.Close(); err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, net.ErrClosed) {
		return err
	}
	return nil
}
