"""The codebooks of ggml's IQ1, IQ2 and IQ3 formats: entries of eight or four magnitudes, as codes of four bits.

Codes are places in the tables of `kernels.linear.panels`; a set bit of 8 means the negative number. Entries of IQ1 are
there twice: with an eighth added to each number, then with an eighth taken away.
"""

from base64 import b85decode
from functools import lru_cache
from zlib import decompress

import torch
from torch import Tensor

SIZES = {"iq1": 2048, "iq2_s": 1024, "iq2_xs": 512, "iq2_xxs": 256, "iq3_s": 512, "iq3_xxs": 256}  # entries
RAISED, LOWERED = (12, 3, 5), (13, 11, 4)  # codes of -1, 0 and 1 with an eighth added, and taken away


@lru_cache
def codebook(name: str) -> Tensor:
    """Codes of the entries of one, uint8 [entries, 8], of IQ3 [entries, 4]."""
    packed, at = torch.frombuffer(bytearray(decompress(b85decode(DATA))), dtype=torch.uint8), 0
    for each, entries in SIZES.items():
        bits, elements = (4, 4) if each.startswith("iq3") else (2, 8)
        size = entries * elements * bits // 8
        if each == name:
            fields = torch.arange(0, 8, bits, dtype=torch.uint8)
            places = (packed[at : at + size].unsqueeze(1) >> fields & ((1 << bits) - 1)).view(entries, elements)
            if name != "iq1":
                return places
            return torch.cat([torch.tensor(codes, dtype=torch.uint8)[places.int()] for codes in (RAISED, LOWERED)])
        at += size
    raise KeyError(name)


# Places in a codebook's magnitudes, for IQ1 and IQ2 of two bits, for IQ3 of four, in the order of SIZES; deflated.
DATA = (
    "c-"
    "obkO>?69zP5pYK}TSK){KCFt&Z~2Sv>_CY{>{{V1XlWfh%T|e%sGfElH^(wZzhl)Kbg%DWAWtwfn4n&Y7GKkfcn0_kG<L1cDF<gK#JVkq`~B5DyihGNe"
    "KVWI+xTL2alD^`Rk@Kuc&1?V$sN!Wc}#6wJVR_!1Uj8Lq+_Y{E8NhXXi-"
    "oA4tX!((^~&)_W#Aqava8H7eyghz@<8Bq}f@sJQ{A#J3K^pPPlMiOL!ERi*`M-B*yQYeFpsElf;jn>f+jnFZ=K)2urqZo#zFdEBYmskmtFco{ibj-jk%"
    "*Gtd!+flPMc5<ugmthnmSA)26<c8&Y>Vx%H;hW<Q*ug4=_xa1r`(jE3R2BfD;1~4scCAFf^Y=K@eEGmEY9Oayo{^3fjfAFxA89C$A@@=FYz_L#}7D`Ce"
    "u_ppBB<$T2AX}BW<UHbeL|X$LVQ$mR_W{X()qa@JuE{XV?s%DQ3zUHDhGFOpu8(?MyclXZo38Cdn)_>&!lL$PffcP(+>(2$7Hph0qC`aEX8jiHK+sV`5"
    "6oh!wFVU=k%$WSS(%EJ>3&k|PDOM5^Qisgnk2k``%`4(X9T8Ie75LMG&j+>m6J$}(9oD`l%$Eo)}&tedT8!)!AfXUExTc9z{{VJbzXDT<=09F?ayszAw"
    "<N>!;E^*|YvMcI@?c~pans7I<t4X6<{r4njREvQ#&MQx}p^+q8yMrUY}rf8aG=seBRJT1~ix=hQoLaTI@HfWQ!Xq$FukFL`J9nulqq+4{G?$SLvru+1e"
    "9?@fZN+<M;UeK@fl3vqW8fH)iV^R#wFieiQWH_e4NKA!M7?r6p4~)UsjKjE$#{^8sM9d@8VxE{6X2?vKgxN4}44GqcVouH}xoS?!={Y;+=IS{=7v#cRG"
    "uO(+xp8iq+vbRTHc#g-^ITrcSMo|;&DZiq-pbo~C-3F!c|RZJpYntJI6uiJ`FVbo-"
    "{s%(=}YEPxGY>Mm(@${Qol4W?MwGExNKgwF5}Db<?QnH5@Hb+XEQ9#vMkSvY>_RqDr>MF8?X`EX1i>k9kL0#WY_GL-LnT4<4BI;@|?(3IEB+Vn{&B37j"
    "PjLaZN7fM%;{Ba9a-"
    "MaX!P7Jk7H_&lmYJukr@(@E#xW9lp;G`7xjHOMcDo`2&v$l)wmiK@=206{><Jn1U_1LS1MIu`m{<!a`UHTX5dA$cZIU5>>G#8lolIq9-"
    "=QNPH9r;z*o|i8vQu#g(`bcjB9f6^KH%kS~Y@xu6y7f?o&<twOKxQWzCp3s4a$;>ApnF0w_wSS*%{YSAcK#i-"
    "aWc8mSuu(&L)i~HiCm@bhes+2E@rD{nlnI*dvl)_T8)GEcLQE66Mls2Vp2`VFHyqqbsWxiZ2m&<C|C_81Z9F^PUZn<9`mXq?bye{v{hcYIS5+jL{CYh2"
    "gxl&yUq)=)~Q)wZsq@4uGu#CznIW1>pT4v;&d?|BsK`zOvT$3MUL$+jFc4SYk%aQyjKgk`rC%?!ec_JtBQeMex8LN;Ls=`#nid-"
    "=(cBNhkE3L|)GOcVYutF<&rKG4zO?glZ#Zqj=Q39o*M9QP`q;!-"
    "QWuT0diIONwWu?3+u!^Xdno&uWQfZY@^D3)~YFU+4MOD?Rs;RnasFrH0j_RtO8mOTfsZF(|cGaF5t9^B>PSr%6sSEX0-Ku-_pu$zGnyyk+x|*wAR=KKB"
    "EmfszrK(nIRlRCd&8l5>s$R8GjjE5;PBpF$tJ7*yT~#;LT@|a5HM(|L6Kj>4R?};C&8-Esu-"
    "2@#YH@8`o7QHvMQvMyHB3us8I8~=jn;A+rwLj?lQdO(&<xGgEX~#&&C`6Xp+#C#d(vLCfi}?+ZKln&mA27#+MC8aC=b;K?ZJL<AL<X`L+fGsuzi4aRLA"
    "s`p4PKEtzYV#F6bp)(p9~t8@i?2x}$q~q(AB}`an<gxxUm_`c8iXpuml^kugYvGH8P_az@@@4bdnVMWbxUhGM8j)zA#xFbvbM4BK!F*YJ$G5g4Hn8BL>"
    "QbdA^;8&e}OX2!x;8e8LFz-G$KnzVUoa;9KbOx1ia4bw7h(=k1>VMb<bj?9Ufm<#jO+?c3^S)@f-"
    "w8dCCD{pa@XceupC0mN6T2)K49xUB5EX%Sj$8s&ts#}58utF=cnpVqdTYYP2jjgGbSTk#3t*ni;wGI|+BQ|PdcFIoMgiYF6o3d$}vGew&&Dnx2+6B90O"
    "SWuRY{gdXs$H`+Tel6{v@P4V9ow}%yKeh-V25^OH|<BeWk1;+yJyGtz#iHodu&hb#Gcu6dttBajlH#Z_L~hku!A_LlX7q;?T`-"
    "T&`!?DJFLSwydyZGQ*eq-$&nq^sX8@Ba~>SsF&xve9NTdm*YTXX6F8w0IW4E_#LkP;cLvVT89Ryd>a3luvvc;&n}fQTn{v}G;nHr-"
    "<=nEXx;6K~HC)TJUB`7@&-LAg8@iF(bqDUqow$iRcUSJ43wwx%c^QxND3A6SFYk$-"
    ">?xk=RXxqqJ;O6S%d<Vlb3M<idw~~vk=OKEUdM~Qfj9Q1UgFKXxwr7P9$Lribp5i<*2Q|EUaG70T3xFfb-V7=-"
    "MUwA)T8=i{i)um59^b9QlHi5_1F5Uj`@_&_<3LS6<_yl-"
    "|=0)?gxJ8H~p61@n`<lhXXW71?eCg&;b|lK_MswYM=#1U<Xd%1yRrpo`PO53?@Mmtb$$e7LX05k#9&1xlwJ{4X5EY{6^duH)f4(gAB7F9Wvo%$c2Tl6i"
    "Q(wRKr^M5E`Ks+MyGAVLkN2Mi_;?Fb)UdD4c}TFbQYjJbVpT;U;_wu?UYc5gE}D6Xhc%Qlo05MS5gJR%Ay`<V8UgMp4v^TG2~1h=$QPN}^e`h+d<0w2g"
    "MrK0=!5Cf#J4g=Vo?YD!JDS!+Htji%MKn@-bh)|-"
    "AaYCbmG&2BSp4x7{FtT}Hkn#<;<xoaMp%wzshe3T!}NBgn<7(BKf<Hzyi{BidPx6l^RqFY=`Xcbzemei74YOC6+wTzb4vRh8eYx%9H_0;ONdaYqAX{}n"
    "D*0%N5BA=M2+>`vIJZVq*ll|mA)t|zr=&AMe@-"
    "%&#KfONfo}f0;#@m@T+veNFcDb##^|sNr+D_YRN9}gI+wQlA?WDbIuiN|fp^bIO4%J~g`Ht9;J4#3E=pD0Tcbtyf@j79r*=cp+&Y&~x%sPwCwgYvMF5b"
    ";_=`P#lyTxv~Yjmxy*NwXEZnxX-4!cQr*<E+{-9wk^<$H2Z=@~t{SMLSAu-EEMdy5_%r{io)$Cq&-"
    "F2zzT$7)=Qjo6Cq*onQk9!GIAevF^uPTY%M;z2x$Cvg(b<6TU?FfaKR@kM@7UbL5o7yZS4@m}gL!AtYy=_P&{zr4O|UZ6hG$NQN+-DmrJzt}JL<-"
    "XcC`c~iTNBvg6-"
    "S77M{b4`pFZ=8MzJKUrgVcZ=Py=Ql4&;F{s1CG&J}?LNpgsr&;UFH&28+RV01c5LKFkd1Av@%U#bJ4<4vnETbcXF=ci0~ehskg`To3od!w?&hBW9Ev<w"
    "xR39#u!$$R4?)`lvN}8pWgWXgZpW7NhM59;4&bI6WrD^f))Z9CKq~To{+e(pVkqV`FTM?XffV#*J|_?u}o@lW{Vhk5}W(csG6<V-s>hP4W|QqD-"
    "n2ZK6-ii9K;A%}Hw#Po|UE<ZS{^(P?T*OzCNET9``Hhp92OruNjCx>IlJPlIV=8cloCm+53WohH-ybTxgOLJ5}ONhTo@GNBSWVUm2pC1O%a%88sPiJDX"
    "sEzuJrF%v7X6DM&KFR3R%5++g7Oj=1NiIaXZPA17TNs?KzNM4g=vQD<iJ~<@t44n}(dX}HDv%;)2Q)jiAHZx}C%$_+jZx+oSXWdzEHkb`(li75Z%r>*#"
    ">}`h4nR$LL&gFS^uFuW6J$L5yc{q>e@q9d=%@_0S99^Uq=>@UKF6c#Wak*d@+(K9s7Sf`!P#3ku!@^it3wz-#yhURXEt-"
    "p`MQ71lj24qcvUpvr7P|%ZO23M)%4_vid(~g<SNAn|jbF#F)7Rv6_6jYLCBDoo=_R}5m&IjysV<GBwRD!=vc2ps`^(`nSuU6B<$ifsVypCuTv01#m0w-"
    "1sw-_}tn8J$s;`1oxQbV!)nqkWEmp`HUuV|DI=|-"
    "E#dUeDu8p;`_SVt5z3#62>)|?CFW2k!etlTyH{wR#C>woaZS0M^sc(W!v}tZ0H?2*)No~_xVw>I4+uXLWEp01Xb!%*`t-W=&-"
    "Zt7kZ9CiEHr~E$2iwUu+0KD{k~?O1x#M=?PT5s=4?A;b@0^{x^LLHi%WkwwcC+1Lx7uxXyB)Mg_V_-tXZQTRxG(RGy|s7t-oCx>?)&@UKG`q#>-"
    "~Oz*kf<hTmFrE6W`=F{mp)>zXfm2x7OR}ZT1EokOO|m9M}VYC?3iO<6s?}L;KJ@^bf;Ba#$YLhyCGjfd1kC6vROJ(=z}ODnc@(KvhVCbjXBk$b|wZgql"
    "$6^h6+r`p_7fLQ7~19UvG+;S`*P2{;SWa1Q2R0hZtjtim<efGya8J=ljM_z~{FJ$M99-"
    "~?X5o71xa48ai+p%4}+BQl~ORYXH{#75dkj0}+}vPNJOMN?=RCD1HNqdAmA1+;*cPzkM|Dq2GyPy@A42lY@NZJ-g_L3`*6IzUHgg3i$ux<Mff!7vQRG8"
    "l<b7=z_8789`|CSwX##WYOEOw7hyEWkpnjdigY>tkbViY+lXg{D%ebc#sPDJi9<YAGXSrTkPU)k}>|&kHad$4Q*R89a}(xQLf=8CUQsuHiav;x_K$0Uq"
    "LQJjSQ^0f*CQnn-8UbUK&j(o$MY*V0DXO8e<fdX$DTWQO|tNr9eOWMBd%Qbd{{h%7-9If5euqCiMQg;0qaVGtJK5FX(Z4I&~Qi4M^tUWgHq5OZQhYzT-"
    "%NQ}hE3`vp{$&h)HC3#XLi=<2{WR=uNois_Cbjg4W$u`*~W3o?<$tekE(QG<PWa%uI6|z!R%^F!N+sXE_qbx)r6h`3`Nl_F-"
    "<tdgDsUjs)3RR^vN~cW9rd%qZLaI%5shH|hV`@q*DVRp-"
    "6rH9CI!n`Zj^=2Amgowt(ly$kE!w9$!2L%w1PmW%NQPoqMh0fDGi~O;z&SLR%B6Eej?U$BTu#bWa%!%YGjbNN_fD>tgYrlo%j0=6PvzOX44hrhxAN;ed"
    "P!VLm(Iz%F<{;#OR)@_2lg!j^OjkK)mf9Z*$}w*keveGhB=fYxGYC=947(iRyl*SIG^iqJ>c39aO}VATH*DRRquINK!uc$76^eBasnp^f+SRcRo4VVum"
    "oS|2t8pWKq4mMA}LZLE6SoG>S9xDi*Nx2#w-;);Ko>yEK)_es1$Wz!iOSULQ6y`DP@4&h9{eaB~(gDX^D`s5-"
    "sJVONo;NsUS&GMN*}j^dK3MB{`BO`BFoQq>j{+Mp7cpf#Gg|;UY37<1#5zz;E+1EAz4_%d#R@Wlh#)6Zoww2XZL4<*ppdeR(WTf!V?pv_e#}6}pnE2o<"
    "TKR%#WaVpaS~r_!rH3Zh^Nu4EKap%ex<F01g0s1y}hQIx8pDY{|;*L8vGhDuxMDzVa6#>x~}F07(zN=>VTngxcNQ#n;oCA9+VwstaGUwu+Lz-"
    "31&R7HTf;#Cs3D_fPT3b567bz6mNXf0hMYFXf=xf)j!Y7%f$wN|ScHLK>=dbLpv(h%UIxJCjSWi?q-"
    "G+k>0(}W+;2jW3`fOG^HC9ab?r89b7XLVi|^`b88ieA+<UDr)um98G>q2AWJdaU>Lu|Cyd12s~>C<!AAd@^TnhG0lW1z2Pa7^G$RM#tzGBLgxq6E{hdG"
    "FekL6;n4`X4`}<)Jj=ti?Fi51arUw1xvCjzyNC}_w%ie)w4zx1gs9Tao}^5%>s8*fU&i07}yp8tV(hq7XeO$yQE9GtSh^UtGji#4QvPX2v72$dcGdl_j"
    "TAu{ghAmS)cZEKIaR*<g0$oH+;+Y{hmMap#TZ601wE33fMpnlt2&K!6HB#1n>%{v1&je7UCfpQXw14p%Ut0JA@-"
    "NA|fezh#sR!1cAj4KcbJsV+2+?)GD_sPpi{<#=w3i+f+LbHniB5+X`6FX4`JN?EviOxIJ!9+i(Z%q&q|>+o3zT4%ZPnQm4{UJGG9{u{xbjuQTerfvt>z"
    "rA&6IuH03+dKd1Yy;LvVBYN2$-OKg3p46-K)LsoNWUJ@*I=x<R)PrIq#$r4sV=89BHdbOiZpXtIenDS|m(q&_)-"
    "Bd2`xMx;N?!;26&|1iX%G$gp*yUD6}le6BXpD=5u@yg2K!SONu$b09o0t0$Qt>h&ZsvUji50$CdbrR9xGsF*2nM!oe&dgvYS9tWQtAkDLJL4>{OmAQ+?"
    "W=&ZcmJf-NW|^JJAkv+69I!E<y@%nNgA{x*je+QM9nz%IhTDx$z9Dlg@wvedx>IxMAC1h!4)?^W~HlG(4}4Z0yV(q^#PY@ls^YwR*$ORV?S+soU3t%Cm"
    "lng9P}{{qnezmxy+f3V;GMg9Mz{gL&5aenx}68_(G|BLPZiRz<YBtLSTJ@H!y)NY?RO{5Bd(G@`Ee{(r=BJ+{TM<(ll#ch1~i^39M?f@{C1-"
    "zYQmj5el|H)dPcsen5^oy)VuCgbZ>VTh9a&{tT3XoIE`u{;n_C&}dACFu-"
    "vXB7ug8=2U6WfSf7BJ1qy#S73`DWg@eEUVL%!yg-->ho0%fAUFaWyUiJmUHG-wYyz5+Dx*=wgZsK$gqG4p8Ozyp=85#eQ*Jd@PMhc$xkC+30_#$&n@hN"
    "fQ4TL;lGQ_QVVwP$HJszvxf`WcW7=jwCp8;79-"
    "+bpG_z^u(#%UqP2=PW^rCZUXeR3YxkBTADmHb4x@2qmkLan^*_kdu&_+bnUTaA<(3UQ;QOyJEc=!u0UJjpdI@*=R7(q(2W#mMBQDum!JtNK!J}fNPy<E"
    "{D%MHzk$vZ8V`*LXf`H1wwM}iz)*d96kDk$>#6Y{&BX%m|Esr-zJIj*V_&5}UrC^!JkU$*$<~*^(vO|=S072Bfd-"
    "&`lz1EGfJ;Nbpv8Xu<jVVg3bacb`0Wgs?Xg`5&?ye+5opYh!?80NfY!iHP2o;U$p{#qJTvCIxwfER{a>!cf=*a2jg`0Bt)TVMb;`hNmTPH~Y@*$K_ivk"
    "60&hUydY}c4PB8u-`TzI(zhn0Ge`J0Ltxs7eK*}YM=J_ejJkmX7m-v;~+OMSkwYqVT(kj*h2_0j{6)k~uZa_Yd>7?-D-"
    "?=pLK8}JsB4GU<Q%Hd9Ng!{%)0%}q(pZqNI>?v+wkQNLbzGeqNK%e&fD|!*XGj7|@R*+^$j>o78IYLZ^iHJ&vI6nQ-"
    "zkv<=aiCA92IbojcHLiWr6sWfg0FQ{;$ht!6rK1It=c-R&gqi;LdSy-"
    "EC!|WWh~C|F~pGbG1P0YU;xXT=DUOk9(pG76S@yc4Lgqku|Y0fZrClPSVZ0p(}ZK{jaNh1ovnMxrTotEfHm-UQ~HJ-"
    "e3k?Ubl?`DoP#l@9X;OwxGBgPvbP;m;ZwF(E&L;UeS?Fs}VD9k5zC%Jh&hu>CD*$0=N+`)8I;S8y(yN1i_~ZIETP58p@s+z(O1#z#Sw(6-"
    "b3XLk9E(@}UOw75V}FKkx-GjGS(P1lPdASMYoI2EK<CH~^0K4SYKo^!zzOAQuROaEORpBOj0oq9UIW1NnkHBj1s;GxCf+W6$`ro3p#K-"
    "_DdX{meZ3^X%){&oc<UK;NA%>K5G8CqRH_6v0q%Njz4-?m+9S*k`PXeaBKMGIf!<NtvmyDd-$IN6*=F{=9I0cdnmX-"
    "~+(~a=IpxxB!j*j$jF%xFJ3ezn#n}AijZ*43lSMiX=djbL2I72ip8-MbG5Fz%L^U4Cq~!1rBrz8vRq&2Ce=r3tylY=NH7q#RYfq{^I)L!-"
    "ag&xOl!e18tuLU4KK}Q59fAI%R>TC+G{{I@k0qupE{VnD@YGsto+@>>cqg`;L2e|4x3_c=!AcVqx|S^!+(Yu-TKNaO@TPp1o#oLGyoN)sv_E$v(5+*`M"
    "GKga86uaPK&t6S*7i1Mn1sgL#xc=Q;k0zve&kGXI7Do&U=J;Grwz3cDh&_$%S+=IZXMa;0B2uVCR^V1+B;R=5{r;hXSNK!Kg`;zv;uzlhHwR6q*n1+HK"
    "hf&%uQd|!Bf{r=N?{XKF`USC|(*YB?R>znJl>-+1<wQ~LW+PMDX`s+1(b9RH>P&eGo)s1xH-+a6I*9~-"
    "=y=8B2Z$I4Xx9}ZtN8NFES9kC4uJ7c#Pj{d1?7Q!GXCKH9%m@C%%?I;?{~`PU-xK%Qd-4AEUb%Pfzuz;z$-"
    "luL&pxsr`H%M>A&}Or#Dc88mu@9l(xqn!k<S60E`ZZq%lGmp*#I^JSI$6Y=?Yi519bYm(x^OF&`;#2i%;w){?pB;`%gz=3Cc%BQobsfdJYVvp<Yx!RQ)"
    "RPnf`qJ`O|0PGollKL%c2l3VjAH(A0kb5}g?s*!`SwYkUJNBF!uF+WgJ@Vj^G8zYt&Ee^I^|U!pJHzZ?n0TDMl!%Gw3nu)o+92l*ZSo&TNmFTfVR@$bO"
    "?hQQ)}AA~`+@u5*^*o{WxxdHt_{lWbq{UL^*!bS*1XVHhqkFciHB>%kl6M9CU&!5?6{`t3O>DhX2JR@Jpufo?)U)8VhH}o6vjrqoXyZ&Z;L%!dBzyJQ_"
    "JNyItaq)xwq5t52R(>M?y7|{J&Ip8p<X=GVPVIjKGXEX=2||8$T6G*O!q@OEEQ2lgd}@6ZEV$$Ua@-(y$VZUq-"
    ";tjPe0F|DoMq3%v*)u5^dqXEzoXyLpD2u-W4D-z-KWA7aZa5x=bz4lbC@_gtt^hXBCd&BkjT%3ep*%J=@|u_Jp&smo8_|CAaBqGa=~8QTvRWb7cj_}PO"
    "-E=SLv@b#_;c?cgLnD*^ATr^a6XsR=_?w<FJ#%bKEue2lprUd}@D^e|LH}{*jk>n}@H6E9&a`>c`c+@I^Qi-vc825aIV{@0s`Nd-"
    "$5T&R%oZSJ(P=bp7obx<PK(o0}Wurg{V4p4}3+;;ni6?UuZ|ySx7I`NOvl(0%HjzqjwH-+ue;kKgV-`X5p0opdjKl)gy6OFv|`@)6viUujm(KdGNk#Q-"
    ")es-M(nP-"
    "n#FEV#8S*g4NS1e~&9*al_Zn%}@RefdIISJr#$n}ygnw(bbOSAG|K#jpCI&jms7t`Rn_|M=|>CBz~#x@(^O$^CiujDg!Ao^PMc=fYR%YxbM^&HM&^r@!"
    "BQ_rG&L<R8#a<friS`d|Ma69=X&"
)
