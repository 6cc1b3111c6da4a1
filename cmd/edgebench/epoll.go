// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"errors"
	"syscall"
)

// poller waits for sockets; one goroutine uses it. Both ends of the measurement run on
// such loops, so that they take little of the machine from what is measured.
type poller struct {
	fd     int
	events [256]syscall.EpollEvent
}

func newPoller() (*poller, error) {
	fd, err := syscall.EpollCreate1(syscall.EPOLL_CLOEXEC)
	if err != nil {
		return nil, err
	}
	return &poller{fd: fd}, nil
}

func (p *poller) close() { _ = syscall.Close(p.fd) }

func (p *poller) add(fd int, events uint32) error {
	return syscall.EpollCtl(p.fd, syscall.EPOLL_CTL_ADD, fd, &syscall.EpollEvent{Events: events, Fd: int32(fd)})
}

func (p *poller) change(fd int, events uint32) error {
	return syscall.EpollCtl(p.fd, syscall.EPOLL_CTL_MOD, fd, &syscall.EpollEvent{Events: events, Fd: int32(fd)})
}

// wait returns what is ready, after at most the timeout in milliseconds. The slice is
// good until the next call.
func (p *poller) wait(timeout int) ([]syscall.EpollEvent, error) {
	for {
		n, err := syscall.EpollWait(p.fd, p.events[:], timeout)
		if errors.Is(err, syscall.EINTR) {
			continue
		}
		if err != nil {
			return nil, err
		}
		return p.events[:n], nil
	}
}

// dial connects a socket to a port of 127.0.0.1 and makes it non-blocking.
func dial(port int) (int, error) {
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	err = syscall.Connect(fd, &syscall.SockaddrInet4{Port: port, Addr: [4]byte{127, 0, 0, 1}})
	if err == nil {
		err = syscall.SetsockoptInt(fd, syscall.IPPROTO_TCP, syscall.TCP_NODELAY, 1)
	}
	if err == nil {
		err = syscall.SetNonblock(fd, true)
	}
	if err != nil {
		_ = syscall.Close(fd)
		return -1, err
	}
	return fd, nil
}

// listen opens a non-blocking listener on a port of 127.0.0.1.
func listen(port int) (int, error) {
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_NONBLOCK|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	err = syscall.SetsockoptInt(fd, syscall.SOL_SOCKET, syscall.SO_REUSEADDR, 1)
	if err == nil {
		err = syscall.Bind(fd, &syscall.SockaddrInet4{Port: port, Addr: [4]byte{127, 0, 0, 1}})
	}
	if err == nil {
		err = syscall.Listen(fd, 1024)
	}
	if err != nil {
		_ = syscall.Close(fd)
		return -1, err
	}
	return fd, nil
}

// again reports whether a call has nothing to do now.
func again(err error) bool { return errors.Is(err, syscall.EAGAIN) || errors.Is(err, syscall.EINTR) }
